//! What a file of results goes through.

use std::fs::File;

use clap::CommandFactory;
use replay_examples::generate::GenerateArgs;
use serde_json::{Value, json};

use super::{Batch, in_order, text};
use crate::{Run, demo, generate, records};

/// Requests of two policies in turns, of several lengths.
fn small() -> Batch {
    let lines: Vec<Value> = (0..6)
        .map(|i| {
            let policy = ["prompt-tail", "off"][i % 2];
            json!({"prompt": text(i * 100, 30), "max_new_tokens": 6 - i, "policy": policy})
        })
        .collect();
    Batch::new(&lines, &["--greedy", "--no-prefix-cache"])
}

/// The later line is done first, and a policy's lines are done together: `input` waits, `finished` does not.
#[test]
fn results_come_in_the_order_that_was_asked_for() {
    let lines = |run: Run| -> Vec<u64> {
        let results = records(&run.ok().0);
        results
            .iter()
            .map(|result| result["line"].as_u64().unwrap())
            .collect()
    };
    let batch = small();
    let run = |order| lines(batch.run_on(&demo(), false, &["--order", order]));
    assert_eq!(run("input"), [1, 2, 3, 4, 5, 6]);
    assert_eq!(run("finished"), [5, 3, 1, 6, 4, 2]);
    batch.resume(&["--order", "input"]);
    let in_file = records(&batch.read("out.jsonl"));
    assert_eq!(in_order(in_file.clone()), in_order(batch.results()));
    assert!(in_file.is_sorted_by_key(|result| result["line"].as_u64()));
    assert!(!batch.path("out.jsonl.pending").exists());
}

/// Whatever is there of a file, half a line too, the rest comes; what is there stays as it is.
#[test]
fn a_run_goes_on_where_one_was_ended() {
    let batch = small();
    batch.resume(&[]);
    let whole = batch.read("out.jsonl");
    let lines: Vec<&str> = whole.split_inclusive('\n').collect();
    for kept in [0, 1, 4, 6] {
        let before = lines[..kept].concat();
        let next = lines.get(kept).copied().unwrap_or("");
        for torn in [0, 1, 9, next.len() / 2, next.len().saturating_sub(1)] {
            let torn = &next[..torn.min(next.len())];
            batch.write("out.jsonl", &(before.clone() + torn));
            let said = batch.resume(&[]);
            let after = batch.read("out.jsonl");
            assert!(after.starts_with(&before), "{after}");
            assert_eq!(in_order(records(&after)), in_order(records(&whole)));
            assert_eq!(said.contains("half a result"), !torn.is_empty(), "{said}");
        }
    }
    // Zeros, as a file may end where the power failed.
    batch.write("out.jsonl", &(lines[0].to_owned() + "{\"li\0\0\0"));
    insta::assert_snapshot!(batch.resume(&[]).lines().next().unwrap(), @"note: --output DIR/out.jsonl line 2: half a result, whose request is computed again");
    assert_eq!(
        in_order(records(&batch.read("out.jsonl"))),
        in_order(records(&whole))
    );
    // Behind all results they stand for none.
    batch.write("out.jsonl", &(whole.clone() + "\0\0\0"));
    let said = batch.resume(&[]);
    insta::assert_snapshot!(said.trim_end(), @r"
    note: --output DIR/out.jsonl line 7: zeros behind the last result are cut off
    batch    6 requests: 0 answered, 6 had results before
    ");
    assert_eq!(batch.read("out.jsonl"), whole);
}

/// Results that waited for an earlier one when a run was ended are not computed again, whichever order is
/// asked for then; those that were written since are not there twice.
#[test]
fn results_that_waited_survive() {
    let batch = small();
    batch.resume(&["--order", "input"]);
    let whole = batch.read("out.jsonl");
    let lines: Vec<&str> = whole.split_inclusive('\n').collect();
    let of_no_run =
        |line: &str| line.replace("\"time_to_first_token_s\":", "\"time_to_first_token_s\":9");
    let waited: Vec<String> = [1, 2, 4].map(|i| of_no_run(lines[i])).to_vec();
    for order in ["input", "finished"] {
        batch.write("out.jsonl", &(lines[0].to_owned() + &waited[0]));
        batch.write("out.jsonl.pending", &(waited.concat() + "{\"line\":6,"));
        let said = batch.resume(&["--order", order]);
        assert!(
            said.contains("out.jsonl.pending line 4: half a result"),
            "{said}"
        );
        let after = batch.read("out.jsonl");
        assert_eq!(
            in_order(records(&after)),
            in_order(records(&whole)),
            "{order}"
        );
        for line in &waited {
            assert_eq!(after.matches(line.as_str()).count(), 1, "{order}: {after}");
        }
        assert_eq!(after.lines().count(), 6);
        let sorted = records(&after).is_sorted_by_key(|result| result["line"].as_u64());
        assert!(order == "finished" || sorted, "{after}");
        assert!(!batch.path("out.jsonl.pending").exists());
    }
}

/// An id that a float would alter finds its request again, also behind a byte-order mark.
#[test]
fn ids_are_told_by_their_spelling() {
    let batch = Batch::new(&[], &["--greedy", "--max-new-tokens", "1"]);
    let ids = [
        "18446744073709551616",
        "18446744073709551617",
        "1.10",
        "1.1",
    ];
    let line = |id| format!("{{\"id\": {id}, \"prompt\": \"a\"}}\n");
    batch.write(
        "in.jsonl",
        &("\u{feff}".to_owned() + &ids.map(line).concat()),
    );
    batch.resume(&["--order", "input"]);
    let first = batch.read("out.jsonl");
    for (id, result) in ids.iter().zip(first.lines()) {
        assert!(result.contains(&format!("\"id\":{id},")), "{result}");
    }
    let again = batch.resume(&[]);
    assert!(
        again.contains("0 answered, 4 had results before"),
        "{again}"
    );
    assert_eq!(batch.read("out.jsonl"), first);
}

/// As without the flag, and not a file of that name.
#[test]
fn a_dash_is_standard_output() {
    let batch = small();
    let (out, _) = batch.run_on(&demo(), false, &["--output", "-"]).ok();
    assert_eq!(in_order(records(&out)), in_order(batch.results()));
    assert!(!std::path::Path::new("-").exists());
}

/// Nobody named it: its flag is what leads to it.
#[test]
fn the_file_of_what_waits_is_told_with_its_flag() {
    let batch = small();
    std::fs::create_dir(batch.path("out.jsonl.pending")).unwrap();
    let refused = batch.refused(&["--order", "input"]);
    insta::assert_snapshot!(refused, @"--output DIR/out.jsonl, DIR/out.jsonl.pending: Is a directory (os error 21)");
    std::fs::remove_dir(batch.path("out.jsonl.pending")).unwrap();
    batch.write("out.jsonl.pending", "of mine\n");
    insta::assert_snapshot!(batch.refused(&[]), @"--output DIR/out.jsonl, DIR/out.jsonl.pending line 1: expected a result of a batch, got something else: choose another file");
}

/// A line that would count as a result and is none would never be computed: whoever reads the file finds out
/// when the run is long over.
#[test]
fn damaged_results_are_refused() {
    let lines = [
        json!({"prompt": "a", "logprobs": true, "max_new_tokens": 3}),
        json!({"prompt": text(0, 30), "stop": [" ", "e", "a", "o"]}),
    ];
    let batch = Batch::new(&lines, &["--greedy", "--max-new-tokens", "60"]);
    batch.resume(&["--order", "input"]);
    let whole = records(&batch.read("out.jsonl"));
    assert_eq!(whole[1]["finish"], "stop_text");
    let write = |results: &[Value]| {
        let lines = results.iter().map(|result| format!("{result}\n"));
        let text: String = lines.collect();
        batch.write("out.jsonl", &text);
        text
    };
    let check = |index: usize, field: &str, value: Option<Value>| {
        let mut results = whole.clone();
        let result = results[index].as_object_mut().unwrap();
        match value {
            Some(value) => result.insert(field.to_owned(), value),
            None => result.remove(field),
        };
        let text = write(&results);
        let refused = batch.refused(&[]);
        assert_eq!(batch.read("out.jsonl"), text);
        refused
    };
    let fields = [0, 1].map(|index| {
        let fields = whole[index].as_object().unwrap().keys();
        let without = fields.map(move |field| (index, field.as_str(), None));
        without.collect::<Vec<_>>()
    });
    let altered = [
        ("line", json!(0)),
        ("finish", json!("tired")),
        ("finish", json!("length")),
        ("text", json!(5)),
        ("ids", json!([5, -1])),
        ("error", json!("of mine")),
        ("logprobs_nats", json!([])),
        ("more", json!(1)),
    ];
    let altered = altered.map(|(field, value)| (1, field, Some(value)));
    let counts = [
        (0, "ids", json!([5, 6])),
        (0, "ids", json!([5, 6, 7, 8])),
        (0, "logprobs_nats", json!([-1])),
        (0, "prompt_logprobs_nats", json!([null])),
        (0, "logprobs_nats", json!([-1, 0.5, -1])),
        (0, "prompt_tokens", json!(3)),
        (0, "cached_tokens", json!(2)),
        (1, "ids", json!([])),
        (1, "ids", json!(vec![5; 61])),
        (1, "stop", json!("u")),
        (0, "ids", json!([5, 6, 99999])),
        (0, "time_to_first_token_s", json!(-1)),
        (0, "logprobs_nats", json!([-1, -1e39, -1])),
        (0, "prompt_logprobs_nats", json!([null, 0.1])),
    ];
    let counts = counts.map(|(index, field, value)| (index, field, Some(value)));
    let told = fields.concat().into_iter().chain(altered).chain(counts);
    let told: Vec<String> = told
        .map(|(index, field, value)| check(index, field, value))
        .collect();
    insta::assert_snapshot!(told.join("\n"));
    // As they were, they count.
    write(&whole);
    let said = batch.resume(&[]);
    assert!(said.contains("0 answered, 2 had results before"), "{said}");
}

/// A result that is there stays as it is, so that its line is that of a file that may have changed since; its
/// id tells what it answers.
#[test]
fn a_result_keeps_the_line_that_it_was_computed_from() {
    let line = |id: &str| json!({"id": id, "prompt": id, "max_new_tokens": 1});
    let batch = Batch::new(&[line("a"), line("b")], &["--greedy"]);
    batch.resume(&["--order", "input"]);
    let lines = ["c", "a", "b"].map(|id| format!("{}\n", line(id)));
    batch.write("in.jsonl", &lines.concat());
    batch.resume(&[]);
    let results = records(&batch.read("out.jsonl"));
    let told: Vec<_> = results.iter().map(|r| (&r["id"], &r["line"])).collect();
    let expected = [("a", 1), ("b", 2), ("c", 1)].map(|(id, line)| (json!(id), json!(line)));
    assert!(
        told.into_iter()
            .eq(expected.iter().map(|(id, line)| (id, line)))
    );
    let help = GenerateArgs::command().render_long_help().to_string();
    let words: Vec<&str> = help.split_whitespace().collect();
    let rule = "where the file has changed its line may be another since, its id not";
    assert!(words.join(" ").contains(rule), "{help}");
}

/// A file that is not of this batch is refused, and stays as it is.
#[test]
fn results_of_something_else_are_refused() {
    let batch = small();
    batch.resume(&["--order", "input"]);
    let whole = batch.read("out.jsonl");
    let check = |text: &str, more: &[&str]| {
        batch.write("out.jsonl", text);
        let refused = batch.refused(more);
        assert_eq!(batch.read("out.jsonl"), text);
        refused
    };
    let lines: Vec<&str> = whole.split_inclusive('\n').collect();
    let told = [
        check("a text\nof mine", &[]),
        check("a text of mine", &[]),
        check(&(whole.clone() + "a text of mine"), &[]),
        check(&whole, &["--no-activation-rounding"]),
        check(&whole.replace("\"id\":3", "\"id\":7"), &[]),
        check(&(whole.clone() + lines[2]), &[]),
        check(&[lines[1], lines[0]].concat(), &["--order", "input"]),
    ];
    insta::assert_snapshot!(told.join("\n"));
    // What would draw other texts is another request, and what is greedy stays what it is.
    batch.write("out.jsonl", lines[0]);
    batch.resume(&["--seed", "7"]);
    // `--greedy` and `--temperature` exclude each other.
    let drawn = Batch {
        flags: vec!["--no-prefix-cache", "--temperature", "1"],
        ..batch
    };
    insta::assert_snapshot!(drawn.refused(&[]), @"--output DIR/out.jsonl line 1: the result of id 1 is that of another request, model or precision: choose another file, or remove the line");

    let locked = File::open(drawn.path("out.jsonl")).unwrap();
    locked.lock().unwrap();
    insta::assert_snapshot!(drawn.refused(&[]), @"--output DIR/out.jsonl: another run writes to it");
}

/// The system says that there is no such file, of one that is to be made.
#[cfg(target_os = "linux")]
#[test]
fn a_place_that_takes_no_results_is_told_by_its_directory() {
    let batch = small();
    let link = batch.path("link");
    std::os::unix::fs::symlink("no/such", &link).unwrap();
    let below_a_file = batch.path("in.jsonl").join("out");
    let told = [
        "/no/such/place",
        "/proc/x",
        link.to_str().unwrap(),
        below_a_file.to_str().unwrap(),
        "no-such/place",
    ]
    .map(|place| {
        let input = batch.path("in.jsonl");
        let flags = ["--batch", input.to_str().unwrap(), "--output", place];
        batch.shown(&generate(&flags).refused())
    });
    insta::assert_snapshot!(told.join("\n"), @r"
    --output /no/such/place: expected a directory at /no/such, there is none
    --output /proc/x: the directory /proc takes no file: No such file or directory (os error 2)
    --output DIR/link: expected a file, found a symbolic link to no/such, where none can be made
    --output DIR/in.jsonl/out: expected a directory at DIR/in.jsonl, found something else
    --output no-such/place: expected a directory at no-such, there is none
    ");
}
