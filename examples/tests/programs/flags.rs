//! Values that a flag refuses: each message says whose value it is.

use std::ffi::OsString;

use clap::{CommandFactory, Parser};
use replay_examples::flags::{message, parse};
use replay_examples::generate::GenerateArgs;
use replay_examples::perplexity::PerplexityArgs;
use replay_examples::serve::ServeArgs;

/// The first line of what a refused command line gets; none of one that is fine.
fn refusal<A: Parser>(args: &[OsString]) -> Option<String> {
    let program = OsString::from("program");
    let refusal = parse::<A>(std::iter::once(&program).chain(args).cloned()).err()?;
    assert_eq!(refusal.exit_code(), 2);
    Some(refusal.to_string().lines().next().unwrap().to_owned())
}

/// What is no value of any number or name: clap alone takes the first three for flags, and of the
/// last does not say whose it is.
fn strange() -> Vec<OsString> {
    let mut values: Vec<OsString> = ["-x", "-inf", "-1e-9"].map(OsString::from).to_vec();
    #[cfg(unix)]
    values.push(std::os::unix::ffi::OsStringExt::from_vec(b"a\xff".to_vec()));
    values
}

/// Flags that take a text as it is.
const TEXTS: [&str; 8] = [
    "prompt",
    "prompt-file",
    "model",
    "served-model-name",
    "host",
    "api-key",
    "batch",
    "output",
];

/// Path flags take any value, and of `--text` what begins with a hyphen ends the list.
fn every_flag_names_itself<A: Parser + CommandFactory>() {
    let command = A::command();
    let takes_one = |arg: &&clap::Arg| {
        arg.get_action().takes_values() && arg.get_num_args().is_none_or(|n| n.max_values() == 1)
    };
    let flags: Vec<&str> = command
        .get_arguments()
        .filter(takes_one)
        .filter_map(clap::Arg::get_long)
        .collect();
    assert!(flags.len() > 5, "{flags:?}");
    for flag in flags {
        for value in strange() {
            let args = [format!("--{flag}").into(), value.clone()];
            match refusal::<A>(&args) {
                Some(text) => assert!(text.contains(&format!("for '--{flag} <")), "{flag}: {text}"),
                None => assert!(TEXTS.contains(&flag), "{flag} takes {}", value.display()),
            }
        }
    }
}

#[test]
fn no_value_is_taken_for_a_flag_or_refused_without_its_flag() {
    every_flag_names_itself::<GenerateArgs>();
    every_flag_names_itself::<PerplexityArgs>();
    every_flag_names_itself::<ServeArgs>();
}

/// A heading holds for all flags behind it: one that measures or bounds memory is not about graphs.
#[test]
fn flags_stand_under_their_own_heading() {
    let under = |command: &clap::Command| -> Vec<String> {
        let arguments = command.get_arguments();
        let headed = arguments.filter(|arg| arg.get_help_heading().is_some());
        let names = headed.filter_map(clap::Arg::get_long);
        names.map(str::to_owned).collect()
    };
    let graphs = [
        "graphs",
        "capture-sizes",
        "replay-capture-sizes",
        "trim-threshold",
        "max-captured-tokens",
    ];
    for command in [GenerateArgs::command(), ServeArgs::command()] {
        assert_eq!(under(&command), graphs);
    }
    for command in [
        GenerateArgs::command(),
        PerplexityArgs::command(),
        ServeArgs::command(),
    ] {
        let help = command.clone().render_long_help().to_string();
        assert!(!help.contains('`'), "{help}");
    }
}

#[cfg(unix)]
#[test]
fn text_that_is_no_utf_8_is_refused_by_its_flag() {
    let value = std::os::unix::ffi::OsStringExt::from_vec(b"a\xff".to_vec());
    let text = refusal::<GenerateArgs>(&["--prompt".into(), value]).unwrap();
    insta::assert_snapshot!(text, @r"error: invalid value 'a\xff' for '--prompt <TEXT>': expected UTF-8 text, got byte 0xff at offset 1");
}

/// A variable of a shell that is not set leaves an empty value, which clap takes for none at all.
#[test]
fn an_empty_value_is_named_as_one() {
    let of = |args: &[&str]| -> Vec<OsString> { args.iter().map(OsString::from).collect() };
    for args in [
        &["--model", ""][..],
        &["--model="],
        &["--output", ""],
        &["--batch", ""],
        &["--prompt-file", ""],
        &["--dtype", ""],
        &["--graphs="],
        &["--order", ""],
    ] {
        let text = refusal::<GenerateArgs>(&of(args)).unwrap();
        let flag = args[0].trim_end_matches('=');
        let named = format!("error: invalid value '(empty)' for '{flag} <");
        assert!(text.starts_with(&named), "{text}");
        let expected = match flag {
            "--model" => "expected the path of a directory, got none",
            "--output" | "--batch" | "--prompt-file" => "expected the path of a file, got none",
            // Clap lists the names that there are, below.
            _ => "",
        };
        assert!(text.ends_with(expected), "{text}");
    }
    for args in [&["--text", ""][..], &["--text", "a", ""]] {
        let text = refusal::<PerplexityArgs>(&of(args)).unwrap();
        insta::allow_duplicates! {
            insta::assert_snapshot!(text, @"error: invalid value '(empty)' for '--text <FILE>...': expected the path of a file, got none");
        }
    }
    let missing = refusal::<GenerateArgs>(&of(&["--prompt", "", "--model"])).unwrap();
    insta::assert_snapshot!(missing, @"error: a value is required for '--model <DIR>' but none was supplied");
}

#[test]
fn a_list_that_is_no_list_is_told_of_commas() {
    let refuse = |args: &[&str]| {
        let args: Vec<OsString> = args.iter().map(OsString::from).collect();
        refusal::<PerplexityArgs>(&args).unwrap()
    };
    insta::assert_snapshot!(refuse(&["--contexts", "128 256"]), @"error: invalid value '128 256' for '--contexts <N>': expected a whole number, 1 or more; several are separated by commas, without blanks");
    insta::assert_snapshot!(refuse(&["--contexts", "128, 256"]), @"error: invalid value ' 256' for '--contexts <N>': expected a whole number, 1 or more; several are separated by commas, without blanks");
    insta::assert_snapshot!(refuse(&["--policies", "off;exact"]), @r#"error: invalid value 'off;exact' for '--policies <POLICY>': no replay policy is called "off;exact": expected off, step-tail, prompt-tail or exact; several are separated by commas, without blanks"#);

    let stray = ["program", "--contexts", "128", "256"].map(OsString::from);
    let text = parse::<PerplexityArgs>(stray).unwrap_err().to_string();
    insta::assert_snapshot!(text.lines().take(3).collect::<Vec<_>>().join("\n"), @r"
    error: unexpected argument '256' found

      tip: every argument belongs to a flag; a value with blanks stands in quotes; several values of --contexts, --policies are separated by commas, without blanks; several values of --text are separated by blanks
    ");
    // An unknown flag is something else.
    let unknown = parse::<PerplexityArgs>(["program", "--what"].map(OsString::from));
    assert!(!unknown.unwrap_err().to_string().contains("commas"));
}

/// Arguments are repeated in messages: they must not clear a terminal, turn a line around, look like
/// lines of the program's own, or fill the screen.
#[test]
fn what_is_repeated_of_a_command_line_is_escaped() {
    let refuse = |args: &[&str]| {
        let args = ["program"].iter().chain(args).map(OsString::from);
        message(&parse::<GenerateArgs>(args).unwrap_err())
    };
    let bad = "1\u{202e}2\u{9b}3\r4\u{7}5\u{1b}[2J\nerror: none";
    for args in [&["--top-k", bad][..], &[bad], &[&format!("--{bad}")]] {
        let text = refuse(args);
        let first = text.lines().next().unwrap();
        assert!(
            first.contains(r"1\u{202e}2\u{9b}3\r4\u{7}5\u{1b}[2J\nerror: none"),
            "{first}"
        );
        assert!(!text.contains("\nerror: none"), "{text}");
        assert!(!text.contains("\n\n\n"), "{text}");
        let raw = |c: char| c != '\n' && !deepseek_model::plain::is_plain(c);
        assert!(!text.contains(raw), "{text:?}");
    }
    let long = "x".repeat(100_000);
    for args in [
        &["--top-k", &long][..],
        &[&long],
        &["--replay", &long],
        &[&format!("--{long}")],
    ] {
        let text = refuse(args);
        assert!(text.len() < 2000, "{} bytes", text.len());
    }
}
