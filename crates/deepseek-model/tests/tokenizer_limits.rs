//! What a tokenizer file or a text could cost: memory without bound, and ids that change.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use deepseek_model::tokenizer::{Tokenizer, TokenizerError};
use proptest::prelude::*;
use serde_json::{Value, json};

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/engram-s1")
}

fn tokenizer() -> Tokenizer {
    Tokenizer::load(fixture()).unwrap()
}

/// The fixture's file after `change`, loaded from a directory of its own.
fn load_changed(change: impl FnOnce(&mut Value)) -> Result<Tokenizer, TokenizerError> {
    let bytes = std::fs::read(fixture().join("tokenizer.json")).unwrap();
    let mut file = serde_json::from_slice(&bytes).unwrap();
    change(&mut file);
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
    Tokenizer::load(dir.path())
}

/// The error's text, with the temporary directory cut out.
#[track_caller]
fn refusal(result: Result<Tokenizer, TokenizerError>) -> String {
    let text = result.unwrap_err().to_string();
    let file = text.find("tokenizer.json").expect("it names the file");
    let start = text[..file].rfind(' ').map_or(0, |space| space + 1);
    format!("{}{}", &text[..start], &text[file..])
}

/// To encode what cannot fit costs gigabytes before it is refused.
#[test]
fn a_text_that_cannot_fit_is_refused_by_its_length() {
    let tokenizer = tokenizer();
    // The longest is a special token; its bars and underscores take three bytes each.
    let longest = "<｜begin▁of▁sentence｜>";
    assert_eq!(tokenizer.longest_token_bytes(), Some(longest.len()));
    let fits = longest.repeat(10);
    tokenizer.check_length(&fits, 10).unwrap();
    assert_eq!(tokenizer.encode(&fits).unwrap().len(), 10);
    let error = tokenizer.check_length(&fits, 9).unwrap_err();
    insta::assert_snapshot!(error, @"expected a text of at most 9 tokens of 29 bytes or less, so 261 bytes, got 290 bytes");
    tokenizer.check_length("", 0).unwrap();
    tokenizer.check_length("a", 0).unwrap_err();
}

/// Byte letters are one or two bytes each and stand for one.
#[test]
fn a_byte_letter_stands_for_one_byte() {
    let tokenizer = load_changed(|file| {
        file["added_tokens"] = json!([]);
        file["model"]["vocab"] = json!({"Ã": 0, "©": 1, "Ã©": 2});
        file["model"]["merges"] = json!([["Ã", "©"]]);
    });
    let tokenizer = tokenizer.unwrap();
    assert_eq!(tokenizer.longest_token_bytes(), Some(2));
    assert_eq!(tokenizer.encode("éé").unwrap(), [2, 2]);
}

/// A bound that does not hold would refuse a prompt that fits.
#[test]
fn a_token_that_stands_for_any_text_has_no_bound() {
    type Change = fn(&mut Value);
    let any: [(&str, Change); 5] = [
        ("a normalizer", |file| {
            file["normalizer"] = json!({"type": "Strip", "strip_left": true, "strip_right": true});
        }),
        ("a nested normalizer", |file| {
            file["normalizer"] = json!({"type": "Sequence", "normalizers": [{"type": "NFC"}]});
        }),
        ("blanks taken out", |file| {
            file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
                {"type": "WhitespaceSplit"}, file["pre_tokenizer"],
            ]});
        }),
        ("blanks beside a token", |file| {
            file["added_tokens"][0]["rstrip"] = json!(true);
        }),
        ("what is unknown", |file| {
            file["model"]["unk_token"] = json!("a");
        }),
    ];
    for (what, change) in any {
        let tokenizer = load_changed(change).unwrap();
        assert_eq!(tokenizer.longest_token_bytes(), None, "{what}");
        tokenizer.check_length("a text", 0).unwrap();
    }
    // As the released file has it.
    let empty = load_changed(|file| {
        file["normalizer"] = json!({"type": "Sequence", "normalizers": []});
        file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}"}, "behavior": "Isolated", "invert": false},
            file["pre_tokenizer"],
        ]});
    });
    assert!(empty.unwrap().longest_token_bytes().is_some());
}

proptest! {
    /// No text has fewer tokens than its length says.
    #[test]
    fn no_text_that_fits_is_refused(text in r"(\PC|[ -~]|[ \t\r\n]|<｜end▁of▁sentence｜>|the |  ){0,20}") {
        let tokenizer = tokenizer();
        let tokens = tokenizer.encode(&text).unwrap().len();
        tokenizer.check_length(&text, tokens).unwrap();
    }
}

/// The library would allocate what the table's first four bytes say, up to 8 GiB.
#[test]
fn a_table_that_announces_more_than_it_has_is_refused() {
    let with = |table: String| {
        load_changed(move |file| {
            file["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": table});
        })
    };
    insta::assert_snapshot!(refusal(with("/////wAAAAA=".to_owned())), @r#"the tokenizers crate 0.23 cannot read the normalizer "Precompiled" of tokenizer.json, which is damaged or newer than the library: precompiled_charsmap announces a trie of 4294967295 bytes, expected at most the 4 that follow"#);
    // One byte more than there are.
    insta::assert_snapshot!(refusal(with("BQAAAAAAAAA=".to_owned())), @r#"the tokenizers crate 0.23 cannot read the normalizer "Precompiled" of tokenizer.json, which is damaged or newer than the library: precompiled_charsmap announces a trie of 5 bytes, expected at most the 4 that follow"#);
    // As many as there are: a trie of one block that leads nowhere, and no replacements.
    let block = "AAAA".repeat(341);
    with(format!("AAQA{block}AAA=")).unwrap();

    let nested = load_changed(|file| {
        file["normalizer"] = json!({"type": "Sequence", "normalizers": [
            {"type": "NFC"}, {"precompiled_charsmap": "/////wAAAAA="},
        ]});
    });
    insta::assert_snapshot!(refusal(nested), @r#"the tokenizers crate 0.23 cannot read the normalizer "Sequence" of NFC, ? of tokenizer.json, which is damaged or newer than the library: precompiled_charsmap announces a trie of 4294967295 bytes, expected at most the 4 that follow"#);
}

/// The library answers each with a panic, which says what its own code is like.
#[test]
fn a_table_that_cannot_be_read_is_refused_in_words() {
    let mut report = String::new();
    // In turn: no digits; an end within a byte, wrong fillings, and a last digit with bits that no byte takes;
    // no length; and a trie of one unit, behind it a byte that is no text.
    let texts = [
        "?",
        "no base64",
        "\u{202e}",
        "BAAAAAAAAAAAA",
        "BAAAAA===",
        "BAAAAB==",
        "",
        "BAAAAAAAAAD/",
    ];
    let texts = texts.map(Value::from).into_iter();
    for table in texts.chain([json!(5), Value::Null]) {
        let normalizer = json!({"type": "Precompiled", "precompiled_charsmap": table});
        let refused = refusal(with_normalizer(normalizer));
        let (_, reason) = refused.split_once("library: ").unwrap();
        writeln!(report, "{reason}").unwrap();
    }
    refusal(with_normalizer(json!({"type": "Precompiled"})));
    insta::assert_snapshot!(report, @r#"
    precompiled_charsmap: expected base64, found "?" at byte 0
    precompiled_charsmap: expected base64, found " " at byte 2
    precompiled_charsmap: expected base64, found "\u{202e}" at byte 0
    precompiled_charsmap: expected base64, found its end at byte 13
    precompiled_charsmap: expected base64, found "=" at byte 6
    precompiled_charsmap: expected base64, found "B" at byte 5
    precompiled_charsmap: expected 4 bytes that announce a trie, found 0 in all
    precompiled_charsmap: expected replacements in UTF-8 behind the trie, found none at byte 8
    precompiled_charsmap: expected a text in base64, found 5
    precompiled_charsmap: expected a text in base64, found null
    "#);
}

/// The library would follow it and panic, at texts that begin with certain bytes.
#[test]
fn a_table_that_leads_out_of_itself_is_refused() {
    // A trie of one unit, of which each byte leads to another.
    let table = json!({"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA="});
    insta::assert_snapshot!(refusal(with_normalizer(table)), @r#"the tokenizers crate 0.23 cannot read the normalizer "Precompiled" of tokenizer.json, which is damaged or newer than the library: precompiled_charsmap leads to unit 1 of a trie of 1"#);
}

fn replace(pattern: &str, content: &str) -> Value {
    json!({"type": "Replace", "pattern": {"String": pattern}, "content": content})
}

fn with_normalizer(normalizer: Value) -> Result<Tokenizer, TokenizerError> {
    load_changed(|file| file["normalizer"] = normalizer)
}

/// Three replacements of a letter by a thousand make a gigabyte of it, of an added token while the
/// file is read.
#[test]
fn steps_that_make_a_text_grow_without_bound_are_refused() {
    let bomb = || replace("o", &"o".repeat(1000));
    let sequence = |steps: &[Value]| json!({"type": "Sequence", "normalizers": steps});
    let mut texts = String::new();
    for normalizer in [
        sequence(&[bomb(), bomb(), bomb()]),
        sequence(&[bomb(), sequence(&[replace("ab", &"ab".repeat(100))])]),
        replace("o", &"o".repeat(65_537)),
        // May match what is empty, beside every byte.
        json!({"type": "Replace", "pattern": {"Regex": "x*"}, "content": "o".repeat(65_536)}),
        json!({"type": "Prepend", "prepend": "o".repeat(65_536)}),
        // A trie of one entry and a replacement of 65,537 bytes, all 0x01.
        json!({"type": "Precompiled", "precompiled_charsmap": format!("AAQA{}{}AQE=", "AAAA".repeat(342), "AQEB".repeat(21_845))}),
    ] {
        texts += &refusal(with_normalizer(normalizer));
        texts.push('\n');
    }
    // Each doubles what is no ASCII, or what the one before made of it.
    let levels = |n: usize| vec![json!({"type": "ByteLevel", "use_regex": false}); n];
    texts += &refusal(with_normalizer(sequence(&levels(17))));
    let dashes = json!({"type": "Metaspace", "replacement": "-", "prepend_scheme": "always"});
    let delimited =
        json!({"type": "CTC", "pad_token": "q", "word_delimiter_token": "", "cleanup": true});
    let parts = [
        ("pre_tokenizer", "pretokenizers", levels(7)),
        ("pre_tokenizer", "pretokenizers", vec![dashes; 7]),
        ("decoder", "decoders", vec![bomb(), bomb()]),
        ("decoder", "decoders", vec![delimited; 17]),
    ];
    for (part, members, steps) in parts {
        let changed = load_changed(|file| file[part] = json!({"type": "Sequence", members: steps}));
        texts.push('\n');
        texts += &refusal(changed)
            .replace("ByteLevel, ", "")
            .replace("Metaspace, ", "")
            .replace("CTC, ", "");
    }
    insta::assert_snapshot!(texts.replace("ByteLevel, ", ""), @r#"
    the normalizer "Sequence" of Replace, Replace, Replace of tokenizer.json can make 1000000000 bytes or more of one, expected at most 65536
    the normalizer "Sequence" of Replace, Sequence of tokenizer.json can make 100000 bytes or more of one, expected at most 65536
    the normalizer "Replace" of tokenizer.json can make 65537 bytes or more of one, expected at most 65536
    the normalizer "Replace" of tokenizer.json can make 65537 bytes or more of one, expected at most 65536
    the normalizer "Prepend" of tokenizer.json can make 65537 bytes or more of one, expected at most 65536
    the normalizer "Precompiled" of tokenizer.json can make 65537 bytes or more of one, expected at most 65536
    the normalizer "Sequence" of ByteLevel of tokenizer.json can make 131072 bytes or more of one, expected at most 65536
    the pre_tokenizer "Sequence" of ByteLevel of tokenizer.json can make 128 bytes or more of one, expected at most 64
    the pre_tokenizer "Sequence" of Metaspace of tokenizer.json can make 128 bytes or more of one, expected at most 64
    the decoder "Sequence" of Replace, Replace of tokenizer.json can make 1000000 bytes or more of one, expected at most 65536
    the decoder "Sequence" of CTC of tokenizer.json can make 131072 bytes or more of one, expected at most 65536
    "#);

    // As known files have them.
    with_normalizer(sequence(&[
        json!({"type": "Prepend", "prepend": "▁"}),
        replace(" ", "▁"),
        replace("``", "\""),
        json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}),
        json!({"type": "NFKC"}),
    ]))
    .unwrap();
    // Steps of which none takes what another gives.
    let marks = ["\"", "'", "``", "-", "<", ">", "|", "~"].map(|mark| replace(mark, "“"));
    with_normalizer(sequence(&marks)).unwrap();
    let blanks = json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"});
    with_normalizer(sequence(&vec![blanks; 6])).unwrap();
}

/// The library answers texts with a panic there, some only those that begin with a certain letter.
#[test]
fn steps_at_which_the_library_fails_are_refused_by_name() {
    let regex =
        |pattern: &str| json!({"type": "Replace", "pattern": {"Regex": pattern}, "content": "z"});
    let sequence =
        |step: Value| json!({"type": "Sequence", "normalizers": [{"type": "NFC"}, step]});
    let prepend = |text: &str| json!({"type": "Prepend", "prepend": text});
    let pieces = |length: usize| json!({"type": "FixedLength", "length": length});
    let strip = |start: usize, stop: usize| json!({"type": "Strip", "content": "a", "start": start, "stop": stop});
    let mut texts = String::new();
    for (part, step) in [
        ("normalizer", replace("", "z")),
        ("normalizer", sequence(replace("", "é"))),
        ("normalizer", regex("x*")),
        ("normalizer", regex("^")),
        ("normalizer", regex("(?=q)")),
        ("normalizer", regex("\u{202e}|")),
        ("normalizer", regex("(?=ROM)")),
        ("normalizer", regex("x+|(?=[KM]B)")),
        ("normalizer", sequence(prepend(""))),
        ("pre_tokenizer", pieces(0)),
        ("decoder", strip(1, 1)),
        ("decoder", strip(0, usize::MAX)),
        (
            "decoder",
            json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, strip(0, 2)]}),
        ),
    ] {
        texts += &refusal(load_changed(|file| file[part] = step));
        texts.push('\n');
    }
    // Of the token " " nothing is left, which is then found between any two bytes.
    texts += &refusal(load_changed(|file| {
        file["normalizer"] = json!({"type": "Strip", "strip_left": true, "strip_right": true});
        file["added_tokens"].as_array_mut().unwrap().push(json!({
            "id": 288, "content": " ", "single_word": true, "lstrip": false, "rstrip": false,
            "normalized": true, "special": false,
        }));
    }));
    insta::assert_snapshot!(texts, @r#"
    the normalizer "Replace" of tokenizer.json has a Replace of {"String":""}, at which the tokenizers crate 0.23 fails: expected a pattern that takes a character or more
    the normalizer "Sequence" of NFC, Replace of tokenizer.json has a Replace of {"String":""}, at which the tokenizers crate 0.23 fails: expected a pattern that takes a character or more
    the normalizer "Replace" of tokenizer.json has a Replace of {"Regex":"x*"}, at which the tokenizers crate 0.23 fails: expected a pattern that takes a character or more
    the normalizer "Replace" of tokenizer.json has a Replace of {"Regex":"^"}, at which the tokenizers crate 0.23 fails: expected a pattern that takes a character or more
    the normalizer "Replace" of tokenizer.json has a Replace of {"Regex":"(?=q)"}, at which the tokenizers crate 0.23 fails: expected a pattern that takes a character or more
    the normalizer "Replace" of tokenizer.json has a Replace of {"Regex":"\u{202e}|"}, at which the tokenizers crate 0.23 fails: expected a pattern that takes a character or more
    the normalizer "Replace" of tokenizer.json has a Replace of {"Regex":"(?=ROM)"}, at which the tokenizers crate 0.23 fails: expected a pattern that takes a character or more
    the normalizer "Replace" of tokenizer.json has a Replace of {"Regex":"x+|(?=[KM]B)"}, at which the tokenizers crate 0.23 fails: expected a pattern that takes a character or more
    the normalizer "Sequence" of NFC, Prepend of tokenizer.json has a Prepend of nothing, at which the tokenizers crate 0.23 fails: expected a text to prepend
    the pre_tokenizer "FixedLength" of tokenizer.json has a FixedLength of 0, at which the tokenizers crate 0.23 fails: expected 1 or above
    the decoder "Strip" of tokenizer.json has a Strip with stop 1, at which the tokenizers crate 0.23 fails: expected stop 0
    the decoder "Strip" of tokenizer.json has a Strip with stop 18446744073709551615, at which the tokenizers crate 0.23 fails: expected stop 0
    the decoder "Sequence" of Fuse, Strip of tokenizer.json has a Strip with stop 2, at which the tokenizers crate 0.23 fails: expected stop 0
    the added token " " of tokenizer.json has nothing left by the normalizer, at which the tokenizers crate 0.23 fails: expected a character or more
    "#);

    // Steps like them that do no harm.
    for (part, step) in [
        ("normalizer", replace("", "")),
        ("normalizer", regex("$")),
        ("normalizer", regex("x+")),
        ("normalizer", prepend("a")),
        ("pre_tokenizer", pieces(1)),
        ("decoder", strip(1, 0)),
        ("decoder", strip(usize::MAX, 0)),
    ] {
        let tokenizer = load_changed(|file| file[part] = step.clone());
        let tokenizer = tokenizer.unwrap_or_else(|error| panic!("{step}: {error}"));
        let all: Vec<u32> = (0..tokenizer.vocab_size() as u32).collect();
        tokenizer.decode(&all).unwrap();
        for text in ["a", "the cafe", "  ", "é"] {
            match tokenizer.encode(text) {
                Ok(_) | Err(TokenizerError::NoToken { .. }) => {}
                Err(error) => panic!("{step}: {text:?}: {error}"),
            }
        }
    }
}

/// One of the library's decoders counts down from the last of no tokens.
#[test]
fn no_token_is_no_text() {
    let decoder = json!({"type": "BPEDecoder", "suffix": "</w>"});
    let tokenizer = load_changed(|file| file["decoder"] = decoder).unwrap();
    assert_eq!(tokenizer.decode(&[]).unwrap(), "");
    assert_eq!(tokenizer.decode(&[u32::MAX]).unwrap(), "");
}

/// A step below the bound of a file can still make gigabytes of a long text.
#[test]
fn a_text_that_would_grow_past_all_memory_is_refused() {
    let tokenizer = with_normalizer(replace("o", &"ab".repeat(500))).unwrap();
    assert_eq!(tokenizer.encode("o").unwrap().len(), 1000);
    let error = tokenizer.encode(&"o".repeat(100_000)).unwrap_err();
    let text = error.to_string();
    assert!(
        text.ends_with("could make 100100000 bytes of a text of 100000, expected at most 8388608"),
        "{text}"
    );
    // What is not in the text is not replaced.
    let none = "a ".repeat(100_000);
    assert!(tokenizer.encode(&none).unwrap().len() > 1000);
    let doubled =
        json!({"type": "Sequence", "normalizers": vec![json!({"type": "ByteLevel"}); 16]});
    let doubled = with_normalizer(doubled).unwrap();
    let error = doubled.encode(&"é".repeat(10_000)).unwrap_err();
    assert!(matches!(error, TokenizerError::Grown { .. }), "{error}");
    // Parts of a text between special tokens add up.
    let parts = "<｜end▁of▁sentence｜>oooooooooooooooooooo".repeat(4000);
    let error = tokenizer.encode(&parts).unwrap_err();
    assert!(matches!(error, TokenizerError::Grown { .. }), "{error}");
}

/// The library would count on from the vocabulary's end, and texts would have other ids than the file
/// says.
#[test]
fn an_added_token_keeps_its_id_or_is_refused() {
    let with_id = |id: u64| {
        load_changed(move |file| {
            file["added_tokens"].as_array_mut().unwrap().push(json!({
                "id": id, "content": "<new>", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true,
            }));
        })
    };
    let next = tokenizer().vocab_size() as u64;
    with_id(next).unwrap();
    insta::assert_snapshot!(refusal(with_id(u64::from(u32::MAX))), @r#"tokenizer.json gives the added token "<new>" the id 4294967295, which the tokenizers crate 0.23 makes 288: expected ids that follow those of the vocabulary without a gap"#);
    insta::assert_snapshot!(refusal(with_id(77)), @r#"tokenizer.json gives the added token "<new>" the id 77, which the tokenizers crate 0.23 makes 288: expected ids that follow those of the vocabulary without a gap"#);
}

/// Dropout belongs to training: left on, each call gives a text other ids.
#[test]
fn dropout_in_the_file_is_ignored() {
    let tokenizer = load_changed(|file| file["model"]["dropout"] = json!(0.9)).unwrap();
    let text = "the cafe and the other cafe ".repeat(20);
    let expected = self::tokenizer().encode(&text).unwrap();
    for _ in 0..3 {
        assert_eq!(tokenizer.encode(&text).unwrap(), expected);
    }
}
