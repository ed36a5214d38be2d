//! With which status a program ends that refuses what it was asked for.

use crate::process::{program, texts};

#[test]
fn errors_have_exit_codes_and_one_line() {
    let output = program("generate")
        .args(["--prompt", "a", "--model", "no/such"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let (out, err) = texts(&output);
    assert_eq!(out, "");
    assert!(
        err.starts_with("error: --model no/such: expected a directory, there is none at /")
            && err.ends_with("/no/such\n"),
        "{err}"
    );

    let output = program("perplexity")
        .args(["--last-rows", "0"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        texts(&output)
            .1
            .starts_with("error: invalid value '0' for '--last-rows <N>'")
    );
}

/// A script tells by the status whether it has to mend its flags or its files.
#[test]
fn a_command_line_that_is_wrong_by_itself_has_a_status_of_its_own() {
    let status = |name: &str, flags: &[&str]| {
        let output = program(name).args(flags).output().unwrap();
        let err = texts(&output).1.to_owned();
        assert!(err.starts_with("error: "), "{name} {flags:?}: {err}");
        output.status.code().unwrap()
    };
    for flags in [
        &[][..],
        &["--prompt", ""],
        &["--prompt", "a", "--output", "x"],
        &["--prompt", "a", "--max-running", "2"],
        &["--prompt-file", "-", "--prompt-file", "-"],
        &[
            "--prompt",
            "a",
            "--capture-sizes",
            "100",
            "--max-captured-tokens",
            "50",
        ],
        &[
            "--prompt",
            "a",
            "--capture-sizes",
            "8",
            "--replay-capture-sizes",
            "50",
        ],
    ] {
        assert_eq!(status("generate", flags), 2, "{flags:?}");
    }
    // No window is as short.
    let none = ["--prompt", "a", "--trim-threshold", "0"];
    assert_eq!(status("generate", &none), 2);
    for flags in [
        &["--contexts", "64,64"][..],
        &["--contexts", "5"],
        &["--contexts", "5000", "--last-rows", "6000"],
        &["--last-rows", "129"],
        &["--policies", "off,off"],
        &["--text", "-", "-"],
        &["--text", "README.md", "README.md"],
    ] {
        assert_eq!(status("perplexity", flags), 2, "{flags:?}");
    }
    // No model is needed to know.
    for (name, flags) in [
        ("generate", &[][..]),
        ("generate", &["--prompt", ""]),
        ("generate", &["--prompt-file", "-", "--prompt-file", "-"]),
        ("perplexity", &["--contexts", "5"]),
        ("perplexity", &["--policies", "off,off"]),
        ("perplexity", &["--text", "-", "-"]),
    ] {
        let flags = [&["--model", "no/such"], flags].concat();
        assert_eq!(status(name, &flags), 2, "{flags:?}");
    }
    // These would do with another model, file or machine.
    for flags in [
        &["--prompt", "a", "--trim-threshold", "32"][..],
        &["--prompt-file", "/dev/null"],
        &["--prompt", "a", "--memory-limit", "1MiB"],
        &["--prompt", "a", "--device", "cuda:4096"],
    ] {
        assert_eq!(status("generate", flags), 1, "{flags:?}");
    }
    assert_eq!(status("perplexity", &["--contexts", "5000"]), 1);
}
