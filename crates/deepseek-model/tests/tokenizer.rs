//! The tokenizer around real files, damaged files and ids that come one at a time.

use std::error::Error;
use std::path::{Path, PathBuf};

use deepseek_model::tokenizer::{
    LIBRARY_VERSION, TextStream, Tokenizer, TokenizerError, check_ids,
};
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
    load_text(&file.to_string())
}

fn load_text(text: &str) -> Result<Tokenizer, TokenizerError> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), text).unwrap();
    Tokenizer::load(dir.path())
}

/// The error's text and those of its causes, with the temporary directory cut out.
#[track_caller]
fn refusal<T>(result: Result<T, TokenizerError>) -> String {
    let error = result.err().expect("it is refused");
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    let text = causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"));
    let file = text
        .find("tokenizer.json")
        .expect("the error names the file");
    let start = text[..file].rfind(' ').map_or(0, |space| space + 1);
    format!("{}{}", &text[..start], &text[file..])
}

#[test]
fn text_survives_the_round_trip() {
    let tokenizer = tokenizer();
    for text in [
        "",
        "the cafe",
        " naïve\r\n日本 ① é\t",
        "<｜end▁of▁sentence｜>",
        "a\u{fffd}b",
        "\0",
    ] {
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    }
}

#[test]
fn special_tokens_come_only_when_asked_for() {
    let tokenizer = tokenizer();
    let plain = tokenizer.encode("the").unwrap();
    assert!(plain.iter().all(|&id| id > 2), "{plain:?}");

    let bos = tokenizer.id_of("<｜begin▁of▁sentence｜>").unwrap();
    let with_bos = tokenizer.encode_with_bos(bos, "the").unwrap();
    assert_eq!(with_bos[0], bos);
    assert_eq!(with_bos[1..], plain);
}

#[test]
fn the_vocabulary_counts_added_tokens_once() {
    assert_eq!(tokenizer().vocab_size(), 288);
    let one_more = load_changed(|file| {
        file["added_tokens"].as_array_mut().unwrap().push(json!({
            "id": 288, "content": "<extra>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true,
        }));
    });
    assert_eq!(one_more.unwrap().vocab_size(), 289);
}

/// A file may ask for truncation; a prompt must never lose its end for that.
#[test]
fn truncation_in_the_file_is_ignored() {
    let tokenizer = load_changed(|file| {
        file["truncation"] = json!({
            "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
        });
    });
    assert_eq!(tokenizer.unwrap().encode("x y z").unwrap().len(), 5);
}

/// BR-28: a file of another release of the library. Newer releases write merges as pairs, older ones as two words in one string.
#[test]
fn both_spellings_of_merges_work() {
    let text = " Café ﬁ 日本\r\n";
    let pairs = load_changed(|file| assert!(file["model"]["merges"][0].is_array())).unwrap();
    let words = load_changed(|file| {
        for merge in file["model"]["merges"].as_array_mut().unwrap() {
            *merge = json!(format!(
                "{} {}",
                merge[0].as_str().unwrap(),
                merge[1].as_str().unwrap()
            ));
        }
    });
    assert_eq!(
        words.unwrap().encode(text).unwrap(),
        pairs.encode(text).unwrap()
    );
}

#[test]
fn a_missing_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let text = refusal(Tokenizer::load(dir.path()));
    assert!(text.starts_with("cannot read tokenizer.json: "), "{text}");
}

/// BR-28: a file that broke off is told from one that is newer than the library.
#[test]
fn a_truncated_file_is_named() {
    let bytes = std::fs::read_to_string(fixture().join("tokenizer.json")).unwrap();
    insta::assert_snapshot!(
        refusal(load_text(&bytes[..1000])),
        @"tokenizer.json cannot be read at the key model.type: EOF while parsing an object at line 49 column 10"
    );
    insta::assert_snapshot!(refusal(load_text("")), @"tokenizer.json is not valid JSON (truncated?): EOF while parsing a value at line 1 column 0");
}

/// BR-28: the error names the file, the part and the release of the library.
#[test]
fn an_unknown_normalizer_is_named_with_the_library() {
    let unknown = load_changed(|file| file["normalizer"] = json!({"type": "Frobnicate"}));
    insta::assert_snapshot!(refusal(unknown), @r#"the tokenizers crate 0.23 cannot read the normalizer "Frobnicate" of tokenizer.json, which is damaged or newer than the library: data did not match any variant of untagged enum NormalizerUntagged"#);
    let nested = load_changed(|file| {
        file["normalizer"] =
            json!({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Frobnicate"}]});
    });
    insta::assert_snapshot!(refusal(nested), @r#"the tokenizers crate 0.23 cannot read the normalizer "Sequence" of NFC, Frobnicate of tokenizer.json, which is damaged or newer than the library: data did not match any variant of untagged enum NormalizerUntagged"#);
}

#[test]
fn an_unknown_model_is_named_with_the_library() {
    let unknown = load_changed(|file| file["model"]["type"] = json!("TreeOfTokens"));
    insta::assert_snapshot!(refusal(unknown), @r#"the tokenizers crate 0.23 cannot read the model "TreeOfTokens" of tokenizer.json, which is damaged or newer than the library: data did not match any variant of untagged enum ModelUntagged"#);
}

/// The library passes over most keys that it does not know: what they ask for would not be done.
#[test]
fn unknown_keys_are_named() {
    let text = |change: fn(&mut Value)| refusal(load_changed(change));
    let texts = [
        text(|file| file["vocab"] = json!([])),
        text(|file| file["model"]["byte_falback"] = json!(true)),
        text(|file| file["added_tokens"][1]["specail"] = json!(true)),
        text(|file| file["normalizer"] = json!({"type": "Lowercase", "locale": "tr"})),
        text(|file| {
            let steps = json!([{"type": "NFC"}, {"type": "Strip", "strip_left": true, "strip_right": true, "by": "a"}]);
            file["normalizer"] = json!({"type": "Sequence", "normalizers": steps});
        }),
        text(|file| file["pre_tokenizer"]["trim_offset"] = json!(true)),
        text(|file| file["decoder"]["errors"] = json!("ignore")),
    ];
    insta::assert_snapshot!(texts.join("\n"), @"
    the tokenizers crate 0.23 cannot read the key vocab of tokenizer.json, which is damaged or newer than the library: expected no key but version, truncation, padding, added_tokens, normalizer, pre_tokenizer, post_processor, decoder, model
    the tokenizers crate 0.23 cannot read the key model.byte_falback of tokenizer.json, which is damaged or newer than the library: expected no key but type, dropout, unk_token, continuing_subword_prefix, end_of_word_suffix, fuse_unk, byte_fallback, ignore_merges, vocab, merges
    the tokenizers crate 0.23 cannot read the key added_tokens[1].specail of tokenizer.json, which is damaged or newer than the library: expected no key but id, content, single_word, lstrip, rstrip, normalized, special
    the tokenizers crate 0.23 cannot read the key normalizer.locale of tokenizer.json, which is damaged or newer than the library: expected no key but type
    the tokenizers crate 0.23 cannot read the key normalizer.normalizers[1].by of tokenizer.json, which is damaged or newer than the library: expected no key but strip_left, strip_right, type
    the tokenizers crate 0.23 cannot read the key pre_tokenizer.trim_offset of tokenizer.json, which is damaged or newer than the library: expected no key but add_prefix_space, trim_offsets, type, use_regex
    the tokenizers crate 0.23 cannot read the key decoder.errors of tokenizer.json, which is damaged or newer than the library: expected no key but add_prefix_space, trim_offsets, type, use_regex
    ");
}

/// Keys of every part as the library and those before it write them.
#[test]
fn keys_that_are_known_are_taken() {
    let known: [fn(&mut Value); 6] = [
        |file| file["model"]["byte_falback"] = Value::Null,
        |file| {
            file["pre_tokenizer"] =
                json!({"type": "Metaspace", "replacement": "▁", "add_prefix_space": true});
        },
        |file| file["pre_tokenizer"] = json!({"type": "Metaspace", "replacement": "▁", "str_rep": "▁", "prepend_scheme": "first", "split": false}),
        |file| {
            file["decoder"] =
                json!({"type": "Metaspace", "replacement": "▁", "add_prefix_space": true});
        },
        |file| {
            file["decoder"] =
                json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true});
        },
        |file| {
            file["post_processor"] =
                json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false});
        },
    ];
    for (at, change) in known.into_iter().enumerate() {
        load_changed(change).unwrap_or_else(|error| panic!("{at}: {error}"));
    }
}

#[test]
fn a_broken_merge_is_named() {
    let broken = load_changed(|file| file["model"]["merges"][0] = json!(["no such", "tokens"]));
    insta::assert_snapshot!(refusal(broken), @r#"the tokenizers crate 0.23 cannot read the model "BPE" of tokenizer.json, which is damaged or newer than the library: Token `no such` out of vocabulary"#);
}

/// The error's text with the temporary directory cut out.
#[track_caller]
fn encoding_refusal(tokenizer: Result<Tokenizer, TokenizerError>, text: &str) -> String {
    refusal(tokenizer.unwrap().encode(text))
}

/// The library leaves out what it has no token for, and the model would answer another prompt.
#[test]
fn text_without_a_token_is_refused() {
    let empty = || {
        load_changed(|file| {
            file["model"]["vocab"] = json!({});
            file["model"]["merges"] = json!([]);
            file["added_tokens"] = json!([]);
        })
    };
    insta::assert_snapshot!(encoding_refusal(empty(), "the cafe"), @r#"tokenizer.json has no token for "the" at byte 0 of the text, nor one for what is unknown"#);
    assert_eq!(empty().unwrap().encode("").unwrap(), [0; 0]);

    // One byte of many is gone: the second of `é`.
    let no_byte = || {
        load_changed(|file| {
            let vocab = file["model"]["vocab"].as_object_mut().unwrap();
            vocab.remove("©").unwrap();
            file["model"]["merges"] = json!([]);
        })
    };
    insta::assert_snapshot!(encoding_refusal(no_byte(), "the café"), @r#"tokenizer.json has no token for " café" at byte 3 of the text, nor one for what is unknown"#);
    assert_eq!(no_byte().unwrap().encode("the cafe").unwrap().len(), 8);

    // Nothing is unknown where a token stands for it.
    let unknown = load_changed(|file| {
        file["model"]["vocab"].as_object_mut().unwrap().remove("©");
        file["model"]["merges"] = json!([]);
        file["model"]["unk_token"] = json!("a");
    });
    assert_eq!(unknown.unwrap().encode("é").unwrap().len(), 2);

    let stripped = load_changed(|file| {
        file["normalizer"] = json!({"type": "Strip", "strip_left": true, "strip_right": true});
    });
    insta::assert_snapshot!(encoding_refusal(stripped, " \t "), @"tokenizer.json leaves no token of a text that is not empty, expected at least 1");
}

/// Ids may have gaps: the highest counts, not how many there are.
#[test]
fn a_token_beyond_the_models_vocabulary_is_named() {
    tokenizer().check_fits(288).unwrap();
    tokenizer().check_fits(1000).unwrap();
    let gap = load_changed(|file| file["model"]["vocab"]["far"] = json!(5000)).unwrap();
    assert_eq!(gap.vocab_size(), 289);
    let text = refusal(gap.check_fits(1000));
    insta::assert_snapshot!(text, @r#"tokenizer.json gives the token "far" the id 5000, expected less than the model's vocab_size (1000): tokenizer.json and config.json do not belong together"#);
}

/// Of two ids for a token the library would take either.
#[test]
fn a_token_with_two_ids_is_named() {
    let text = std::fs::read_to_string(fixture().join("tokenizer.json")).unwrap();
    let json: Value = serde_json::from_str(&text).unwrap();
    let doubled = json.to_string().replace("\"a\":", "\"a\":7,\"a\":");
    insta::assert_snapshot!(refusal(load_text(&doubled)), @r"
    tokenizer.json breaks 1 rule:
      model.vocab.a: expected one value, found the key again, with [7,100]
    ");
}

/// The library answers these with a panic.
#[test]
fn an_id_with_two_tokens_is_named() {
    let shared = load_changed(|file| {
        let vocabulary = file["model"]["vocab"].as_object_mut().unwrap();
        let id = vocabulary["e"].clone();
        vocabulary["f"] = id;
    });
    insta::assert_snapshot!(refusal(shared), @r#"tokenizer.json gives the tokens "e" and "f" the id 104, expected an id for each"#);
}

#[test]
fn parts_that_the_library_panics_at_are_named() {
    // At a text that nobody could know when the file was read: the file is to blame all the same.
    let ahead = load_changed(|file| {
        file["normalizer"] = json!({"type": "Sequence", "normalizers": [
            {"type": "NFC"},
            {"type": "Replace", "pattern": {"Regex": "(?=s{2})"}, "content": "x"},
        ]});
    });
    let ahead = ahead.unwrap();
    for fine in ["said it", "it passes"] {
        ahead.encode(fine).unwrap();
    }
    let failed = ahead.encode("ssh");
    assert!(failed.as_ref().is_err_and(TokenizerError::is_of_the_file));
    insta::assert_snapshot!(refusal(failed), @r#"the normalizer "Sequence" of NFC, Replace of tokenizer.json has a Replace of {"Regex":"(?=s{2})"}, at which the tokenizers crate 0.23 fails: expected a pattern that takes a character or more"#);
    let bytes = std::fs::read_to_string(fixture().join("tokenizer.json")).unwrap();
    let json: Value = serde_json::from_str(&bytes).unwrap();
    let decoder = json["decoder"].to_string();
    let number = json.to_string().replace(&decoder, "1e400");
    insta::assert_snapshot!(refusal(load_text(&number)), @"tokenizer.json cannot be read at the key decoder: number out of range at line 1 column 424");
}

#[test]
fn json_that_is_no_tokenizer_is_named() {
    insta::assert_snapshot!(refusal(load_text("{}")), @r#"the tokenizers crate 0.23 cannot read the tokenizer of tokenizer.json, which is damaged or newer than the library: Model missing. at line 1 column 2"#);
    insta::assert_snapshot!(refusal(load_text("[1]")), @r#"the tokenizers crate 0.23 cannot read the tokenizer of tokenizer.json, which is damaged or newer than the library: invalid type: sequence, expected struct Tokenizer at line 1 column 1"#);
    // The library stops at such a key as if the JSON were broken there.
    let with = |key: &str| load_changed(|file| file[key] = json!({"a": 1}));
    insta::assert_snapshot!(refusal(with("zz")), @"the tokenizers crate 0.23 cannot read the key zz of tokenizer.json, which is damaged or newer than the library: expected no key but version, truncation, padding, added_tokens, normalizer, pre_tokenizer, post_processor, decoder, model");
    insta::assert_snapshot!(refusal(with("a.\u{202e}b")), @r#"the tokenizers crate 0.23 cannot read the key "a.\u{202e}b" of tokenizer.json, which is damaged or newer than the library: expected no key but version, truncation, padding, added_tokens, normalizer, pre_tokenizer, post_processor, decoder, model"#);
    insta::assert_snapshot!(refusal(load_changed(|file| file["version"] = json!("2.0"))), @r#"the tokenizers crate 0.23 cannot read the tokenizer of tokenizer.json, which is damaged or newer than the library: Unknown tokenizer version '2.0' at line 1 column 3750"#);
}

/// The version in the error texts is the one the workspace is locked to.
#[test]
fn the_named_library_version_is_the_locked_one() {
    let lock = include_str!("../../../Cargo.lock");
    let entry = format!("name = \"tokenizers\"\nversion = \"{LIBRARY_VERSION}.");
    assert!(
        lock.contains(&entry),
        "Cargo.lock has no tokenizers {LIBRARY_VERSION}"
    );
}

#[test]
fn the_first_id_outside_the_vocabulary_is_named() {
    check_ids(&[0, 287], 288).unwrap();
    let error = check_ids(&[5, 288, 300], 288).unwrap_err();
    insta::assert_snapshot!(error, @"token id 288 at index 1 is outside the vocabulary: expected less than 288");
}

/// Pushes `ids` and returns what each push yields, then what `finish` yields.
fn stream(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
    let mut stream = TextStream::new(tokenizer);
    let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    pieces.push(stream.finish().unwrap());
    pieces
}

/// The ids of single bytes: the fixture's vocabulary lists them in order behind three special
/// tokens.
fn bytes(bytes: &[u8]) -> Vec<u32> {
    bytes.iter().map(|&byte| u32::from(byte) + 3).collect()
}

#[test]
fn a_character_appears_when_its_last_byte_does() {
    let tokenizer = tokenizer();
    let ids = bytes("a€😀b".as_bytes());
    assert_eq!(
        stream(&tokenizer, &ids),
        ["a", "", "", "€", "", "", "", "😀", "b", ""]
    );
}

#[test]
fn text_before_half_a_character_does_not_wait() {
    let tokenizer = load_changed(|file| {
        // One token that ends in the first byte of a character: `x` and 0xC3.
        file["model"]["vocab"]["xÃ"] = json!(288);
        file["model"]["merges"]
            .as_array_mut()
            .unwrap()
            .push(json!(["x", "Ã"]));
    });
    let tokenizer = tokenizer.unwrap();
    let second = bytes(&[0xA9])[0];
    assert_eq!(stream(&tokenizer, &[288, second]), ["x", "é", ""]);
}

#[test]
fn bytes_that_are_no_text_come_out_in_the_end() {
    let tokenizer = tokenizer();
    assert_eq!(stream(&tokenizer, &bytes(&[0xFF])), ["", "\u{fffd}"]);
    assert_eq!(
        stream(&tokenizer, &bytes(b"\xE2\x82z")),
        ["", "", "\u{fffd}z", ""]
    );
    assert_eq!(stream(&tokenizer, &[]), [""]);
}

#[test]
fn a_finished_stream_starts_afresh() {
    let tokenizer = tokenizer();
    let mut stream = tokenizer.stream();
    stream.push(bytes(&[0xE2])[0]).unwrap();
    assert_eq!(stream.finish().unwrap(), "\u{fffd}");
    assert_eq!(stream.push(bytes(b"a")[0]).unwrap(), "a");
    assert_eq!(stream.finish().unwrap(), "");
}

proptest! {
    /// Whatever the ids, the pieces make up the text, and no piece ends in a replacement
    /// character that a later id could have completed.
    #[test]
    fn pieces_make_up_the_text(ids in prop::collection::vec(0..290_u32, 0..60)) {
        let tokenizer = tokenizer();
        let pieces = stream(&tokenizer, &ids);
        prop_assert_eq!(pieces.concat(), tokenizer.decode(&ids).unwrap());
        let (_, pushed) = pieces.split_last().unwrap();
        for piece in pushed {
            prop_assert_ne!(piece.chars().last(), Some(char::REPLACEMENT_CHARACTER));
        }
    }

    /// Leaving nothing out, the ids are those of the library.
    #[test]
    fn ids_are_those_of_the_library(text in r"(\\PC|[ -~]|[ \t\r\n]|<｜end▁of▁sentence｜>|the ){0,20}") {
        let file = fixture().join("tokenizer.json");
        let library = tokenizers::Tokenizer::from_file(file).unwrap();
        let expected = library.encode(text.as_str(), false).unwrap();
        prop_assert_eq!(tokenizer().encode(&text).unwrap(), expected.get_ids());
    }

    #[test]
    fn any_text_survives_the_round_trip(text in any::<String>()) {
        let tokenizer = tokenizer();
        let ids = tokenizer.encode(&text).unwrap();
        prop_assert_eq!(&tokenizer.decode(&ids).unwrap(), &text);
        prop_assert_eq!(stream(&tokenizer, &ids).concat(), text);
    }
}

/// The library's own letters and ours: for every token, and every byte, since each has one.
#[test]
fn a_token_s_bytes_are_what_it_decodes_to() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/v41-demo");
    let tokenizer = Tokenizer::load(demo).unwrap();
    let mut single = std::collections::BTreeSet::new();
    for id in 0..tokenizer.vocab_size() as u32 {
        let bytes = tokenizer.bytes(id).unwrap();
        let text = tokenizer.decode(&[id]).unwrap();
        assert_eq!(String::from_utf8_lossy(&bytes), text, "token {id}");
        if let [byte] = bytes[..] {
            single.insert(byte);
        }
    }
    assert_eq!(single.len(), 256);
    assert_eq!(tokenizer.bytes(u32::MAX), None);
}
