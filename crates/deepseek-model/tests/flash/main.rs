//! The benchmark of V4.1-Flash's geometry: its parts, and all of it on a tiny model.

mod cost;
mod pace;
mod tasks;

#[path = "../../benches/flash/main.rs"]
#[allow(dead_code, reason = "its `main` is for the bench")]
mod flash;

use flash::flags::Flags;

fn flags(words: &[&str]) -> Flags {
    let words = ["--tiny"].iter().chain(words);
    Flags::parse(words.map(|&word| word.into())).unwrap()
}

/// All of it, and what it writes.
#[test]
fn the_whole_program_runs() {
    let folder = tempfile::tempdir().unwrap();
    let [json, svg] = ["flash.json", "flash.svg"].map(|name| folder.path().join(name));
    let mut flags = flags(&["--budget", "600"]);
    (flags.json, flags.svg) = (Some(json.clone()), Some(svg.clone()));
    let mut printed = Vec::new();
    assert!(flash::run(&flags, &mut printed).unwrap());

    let printed = String::from_utf8(printed).unwrap();
    for policy in ["off", "step-tail", "prompt-tail", "exact"] {
        assert!(
            printed.contains(&format!("| 512 | off | {policy} |")),
            "{printed}"
        );
    }
    for title in [
        "Time to first token",
        "each phase",
        "Decode",
        "Serving",
        "Capturing",
    ] {
        assert!(printed.contains(title), "{printed}");
    }
    assert!(
        !printed.contains("skipped") && !printed.contains("NaN"),
        "{printed}"
    );

    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    assert_eq!(json["prefill"].as_array().unwrap().len(), 3 * 4 * 2);
    assert_eq!(json["decode"].as_array().unwrap().len(), 2 * 2 * 2);
    let serving = json["serving"].as_array().unwrap();
    let requests: Vec<_> = serving.iter().map(|case| &case["requests"]).collect();
    assert_eq!(requests, [4, 8]);
    for case in serving {
        let [cold, hit] = ["/cold", "/hit/median"].map(|at| case.pointer(at).unwrap().as_f64());
        assert!(hit.unwrap() < cold.unwrap(), "{case}");
    }
    let [least, most] = [0, 1].map(|i| json["model"]["expert_shares"][i].as_f64().unwrap());
    assert!(least > 0.4 && most < 2.0, "{least} .. {most}");

    let svg = std::fs::read_to_string(svg).unwrap();
    assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    assert_eq!(svg.matches("prompt-tail").count(), 3);
}

/// Nothing is begun that does not fit, and the summary says so.
#[test]
fn without_a_budget_everything_is_skipped() {
    let mut printed = Vec::new();
    let words = [
        "--budget",
        "0",
        "--lengths",
        "64,1K",
        "--policies",
        "off",
        "--batches",
        "2",
    ];
    assert!(flash::run(&flags(&words), &mut printed).unwrap());
    let printed = String::from_utf8(printed).unwrap();
    assert_eq!(
        printed.matches("skipped: ").count(),
        2 * 2 + 2 * 2 + 2,
        "{printed}"
    );
    assert!(printed.contains("skipped: prompt of 1K, off, graphs on: about"));
}

/// A file that cannot be written is refused before anything is measured, and by its name; nothing to draw
/// leaves an old drawing as it is.
#[test]
fn files_are_written_whole_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let short = ["--lengths", "16", "--contexts", "none", "--serving", "none"];
    for flag in ["--json", "--svg"] {
        let none = folder.path().join("no/such/folder");
        let words = [&short[..], &[flag, none.to_str().unwrap()]].concat();
        let mut printed = Vec::new();
        let refused = flash::run(&flags(&words), &mut printed).unwrap_err();
        let refused = format!("{refused:#}");
        assert!(
            refused.starts_with(&format!("cannot write {}: ", none.display())),
            "{refused}"
        );
        assert!(printed.is_empty());
    }
    let svg = folder.path().join("old.svg");
    std::fs::write(&svg, "old").unwrap();
    let mut words = [
        &short[..],
        &["--policies", "exact", "--svg", svg.to_str().unwrap()],
    ]
    .concat();
    flash::run(&flags(&words), &mut Vec::new()).unwrap();
    assert_eq!(std::fs::read_to_string(&svg).unwrap(), "old");
    words[7] = "off";
    flash::run(&flags(&words), &mut Vec::new()).unwrap();
    assert!(std::fs::read_to_string(&svg).unwrap().starts_with("<svg"));
    assert_eq!(
        std::fs::read_dir(folder.path()).unwrap().count(),
        1,
        "nothing beside it"
    );
}

/// What PyTorch took stands beside what was measured of the same, and the rest is left empty.
#[test]
fn a_peer_is_printed_beside() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("peer.json");
    let peer = r#"{"device": "some", "torch": "2.0", "prompts": [{"rows": 64, "policy": "off",
        "phases": {"head": {"eager": 1.25, "graph": null}}}],
        "decode": [{"batch": 3, "context": 64, "step": {"eager": 5.5, "graph": 4.5}}]}"#;
    std::fs::write(&file, peer).unwrap();
    let mut flags = flags(&["--lengths", "64", "--policies", "off", "--contexts", "none"]);
    flags.peer = Some(file.clone());
    let mut printed = Vec::new();
    assert!(flash::run(&flags, &mut printed).unwrap());
    let printed = String::from_utf8(printed).unwrap();
    let line = |start: &str| {
        printed
            .lines()
            .find(|line| line.starts_with(start))
            .unwrap()
    };
    let head = line("| 64, off: head |");
    assert!(
        head.ends_with("| 1.25 |  |") && !head.contains("|  |  |"),
        "{head}"
    );
    assert_eq!(
        line("| decode of 3 after 64 |"),
        "| decode of 3 after 64 |  |  | 5.50 | 4.50 |"
    );

    std::fs::write(&file, "{}").unwrap();
    let error = format!("{:#}", flash::run(&flags, &mut Vec::new()).unwrap_err());
    assert!(
        error.contains("is not what peer_torch.py writes"),
        "{error}"
    );
    for (right, wrong) in [("5.5", "-5.5"), ("some", "a | b"), ("2.0", "2\\n0")] {
        std::fs::write(&file, peer.replace(right, wrong)).unwrap();
        let error = format!("{:#}", flash::run(&flags, &mut Vec::new()).unwrap_err());
        assert!(
            error.contains("is not what peer_torch.py writes: expected"),
            "{error}"
        );
    }
}

/// What is asked for twice is measured once, and a prompt that would be planned for minutes is refused.
#[test]
fn lists_that_make_no_sense() {
    let twice = [
        "--policies",
        "off,exact,off",
        "--lengths",
        "64,64",
        "--batches",
        "2,1,2",
        "--contexts",
        "64,64",
        "--graphs",
        "on,on",
        "--serving",
        "4,4",
    ];
    let geometry = flags(&twice).geometry().unwrap();
    let tasks: Vec<_> = flash::tasks::in_order(&geometry)
        .iter()
        .map(ToString::to_string)
        .collect();
    insta::assert_snapshot!(tasks.join("\n"), @r"
        decode of 2 after 64, graphs on
        prompt of 64, off, graphs on
        prompt of 64, exact, graphs on
        decode of 1 after 64, graphs on
        4 requests of 256 + 64 tokens
        ");
    let long = flags(&["--lengths", "1024K", "--chunk", "1"])
        .geometry()
        .unwrap_err();
    insta::assert_snapshot!(long, @"a prompt of 1024K in chunks of 1 takes 1048576 steps: expected at most 16384 (--lengths, --chunk)");
}

/// The median of an even number of values lies between the middle two.
#[test]
fn medians() {
    for (values, median) in [
        (&[3.0][..], 3.0),
        (&[4.0, 1.0], 2.5),
        (&[9.0, 1.0, 2.0], 2.0),
    ] {
        assert_eq!(
            flash::spread::Spread::of(values.iter().copied()).median,
            median
        );
    }
}

/// Plans are what runs.
#[test]
fn planned_rows_are_the_rows_that_run() {
    use deepseek_model::{
        CacheOptions, LogitRows, Model, ModelOptions, ReplayPolicy, SequenceOptions, StepRequest,
    };
    let config = flags(&[]).geometry().unwrap().config().unwrap();
    let model = Model::random(config.clone(), ModelOptions::default(), 1).unwrap();
    for policy in ReplayPolicy::ALL {
        let mut cache = model
            .new_cache(CacheOptions {
                max_sequences: 1,
                max_tokens: 300,
                page_tokens: CacheOptions::PAGE_TOKENS,
                policy,
                sampled_rows: std::num::NonZeroU32::MIN,
            })
            .unwrap();
        let sequence = SequenceOptions {
            prompt_len: 300,
            keeps_rows: false,
        };
        let sequence = cache.add(sequence).unwrap();
        let planned = flash::plan::chunks(&config, policy, 300, 128).unwrap();
        for (tokens, planned) in vec![7; 300].chunks(128).zip(planned) {
            let request = StepRequest {
                sequence,
                tokens,
                logits: LogitRows::None,
            };
            let output = model.forward(&[request], &mut cache).unwrap();
            assert_eq!(output.stats, planned, "{policy}");
        }
    }
}

#[test]
fn bad_flags_are_refused() {
    for (flag, value, refusal) in [
        ("--lengths", "0", "expected a number from 1 to 1024K"),
        ("--lengths", "8M", "expected a number from 1 to 1024K"),
        ("--policies", "some", "some"),
        ("--budget", "-1", "expected seconds"),
        ("--batches", "", "expected a number from 1 to 1024K"),
        ("--graphs", "all", "expected on or off"),
        ("--tables", "x", "no such flag"),
    ] {
        let words = [flag, value].map(Into::into);
        let error = format!("{:#}", Flags::parse(words).unwrap_err());
        assert!(
            error.starts_with(flag) && error.contains(refusal),
            "{error}"
        );
    }
}
