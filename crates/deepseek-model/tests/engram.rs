//! The engram's integer half against the stored results of the reference.

use std::path::{Path, PathBuf};

use deepseek_model::config::EngramConfig;
use deepseek_model::engram::{EngramError, NgramHasher, TokenMap};
use deepseek_model::tokenizer::Tokenizer;
use deepseek_model::{Model, ModelOptions};
use proptest::prelude::*;
use safetensors::SafeTensors;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(name)
}

/// What `engram-s1/config.json` says.
fn config() -> EngramConfig {
    EngramConfig {
        layers: vec![1, 3],
        table_rows: vec![760, 1140],
        max_ngram: 4,
        heads: 3,
        head_dim: 32,
        vocab_size: 61,
        pad_token_id: 2,
        compressed_vocab_size: 238,
    }
}

fn tokenizer() -> Tokenizer {
    Tokenizer::load(data("engram-s1")).unwrap()
}

/// An error about the fixture's tokenizer.
fn without_dir(error: &EngramError) -> String {
    let dir = data("engram-s1");
    error.to_string().replace(dir.to_str().unwrap(), "DIR")
}

fn hasher() -> NgramHasher {
    let map = TokenMap::from_tokenizer(&tokenizer(), &config()).unwrap();
    NgramHasher::new(&config(), &map).unwrap()
}

/// The rows of one call.
fn rows(hasher: &NgramHasher, slot: usize, ids: &[u32], back: &[u32]) -> Vec<i64> {
    let mut rows = Vec::new();
    hasher.table_rows(slot, ids, back, &mut rows).unwrap();
    rows
}

/// An int64 tensor of the expected results.
fn expected(name: &str) -> Vec<i64> {
    let bytes = std::fs::read(data("engram-s1/expected.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let words = file
        .tensor(name)
        .unwrap()
        .data()
        .chunks_exact(8)
        .map(<[u8; 8]>::try_from);
    words
        .map(|word| i64::from_le_bytes(word.unwrap()))
        .collect()
}

fn tokens() -> Vec<u32> {
    expected("tokens")
        .into_iter()
        .map(|id| u32::try_from(id).unwrap())
        .collect()
}

#[test]
fn the_token_map_is_the_reference_s() {
    let map = TokenMap::from_tokenizer(&tokenizer(), &config()).unwrap();
    let ours: Vec<i64> = map.as_slice().iter().map(|&id| i64::from(id)).collect();
    assert_eq!(ours, expected("engram.token_map"));
    assert_eq!(map.count(), 238);
    assert_eq!(i64::from(map.pad()), expected("engram.token_map")[2]);
}

#[test]
fn table_rows_are_the_reference_s() {
    let hasher = hasher();
    for (slot, layer) in [1, 3].into_iter().enumerate() {
        let rows = rows(&hasher, slot, &tokens(), &[]);
        assert_eq!(rows.len(), 80 * hasher.columns());
        assert_eq!(
            rows,
            expected(&format!("engram.hash.{layer}")),
            "layer {layer}"
        );
    }
}

/// A caller's mistakes are errors, like those of a file.
#[test]
fn tables_and_shapes_that_are_not_there_are_refused() {
    let map = TokenMap::from_tokenizer(&tokenizer(), &config()).unwrap();
    let error = hasher().table_rows(2, &[5], &[], &mut Vec::new());
    insta::assert_snapshot!(error.unwrap_err(), @"expected one of 2 engram tables, got number 2");
    for change in [
        |config: &mut EngramConfig| config.max_ngram = 0,
        |config: &mut EngramConfig| config.max_ngram = 1,
        |config: &mut EngramConfig| config.heads = 0,
    ] {
        let mut config = config();
        change(&mut config);
        let error = NgramHasher::new(&config, &map).unwrap_err();
        assert!(matches!(error, EngramError::NoColumns { .. }), "{error}");
    }
    let (max_ngram, heads) = (0, 3);
    insta::assert_snapshot!(EngramError::NoColumns { max_ngram, heads }, @"the engram has n-grams of up to 0 tokens and 3 heads, expected at least 2 tokens and 1 head");
}

#[test]
fn rows_stay_inside_the_table() {
    let all: Vec<u32> = (0..288).collect();
    for (slot, len) in config().table_rows.into_iter().enumerate() {
        let rows = rows(&hasher(), slot, &all, &[]);
        assert!(rows.iter().all(|&row| (0..len as i64).contains(&row)));
    }
}

/// Places before the text count as the pad token, so spelling pads out changes nothing.
#[test]
fn a_missing_lookback_is_pads() {
    let (hasher, tokens) = (hasher(), tokens());
    for back in [&[][..], &[2], &[2, 2], &[2, 2, 2]] {
        let explicit = rows(&hasher, 0, &tokens, back);
        assert_eq!(
            rows(&hasher, 0, &tokens, &[]),
            explicit,
            "{} pads",
            back.len()
        );
    }
}

/// Only the last N - 1 ids before a run matter, so a caller may hand over the whole history.
#[test]
fn ids_beyond_the_lookback_do_not_matter() {
    let (hasher, tokens) = (hasher(), tokens());
    let short = rows(&hasher, 1, &tokens[40..], &tokens[37..40]);
    assert_eq!(rows(&hasher, 1, &tokens[40..], &tokens[..40]), short);
}

/// The rows of a packed batch are gathered sequence by sequence in one list.
#[test]
fn rows_are_appended() {
    let (hasher, tokens) = (hasher(), tokens());
    let (one, two) = tokens.split_at(30);
    let mut batch = Vec::new();
    hasher.table_rows(0, one, &[], &mut batch).unwrap();
    hasher.table_rows(0, two, &[], &mut batch).unwrap();
    assert_eq!(
        batch,
        [rows(&hasher, 0, one, &[]), rows(&hasher, 0, two, &[])].concat()
    );
}

proptest! {
    /// Hashing a text piece by piece, each with the few ids before it, gives the rows of one go.
    #[test]
    fn pieces_give_what_the_whole_gives(
        ids in prop::collection::vec(0..288_u32, 1..120),
        cuts in prop::collection::vec(0..120_usize, 0..12),
    ) {
        let hasher = hasher();
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(ids.len())).collect();
        cuts.extend([0, ids.len()]);
        cuts.sort_unstable();

        let mut pieces = Vec::new();
        for ends in cuts.windows(2) {
            let (start, end) = (ends[0], ends[1]);
            let back = &ids[start.saturating_sub(hasher.lookback())..start];
            hasher.table_rows(1, &ids[start..end], back, &mut pieces).unwrap();
        }
        prop_assert_eq!(rows(&hasher, 1, &ids, &[]), pieces);
    }
}

/// Both files of the mismatch are named by a model that is loaded.
#[test]
fn a_table_that_does_not_fit_names_the_configuration() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "tokenizer.json"] {
        let text = std::fs::read_to_string(data("engram-s1").join(name)).unwrap();
        let text = text.replace("\"engram_n_heads\": 3", "\"engram_n_heads\": 4");
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    let error = Model::load(dir.path(), ModelOptions::default(), &|_| {}).unwrap_err();
    let text = error
        .to_string()
        .replace(dir.path().to_str().unwrap(), "DIR");
    insta::assert_snapshot!(text, @"DIR/config.json: the engram table of layer 1 has 760 rows, but its hash columns need at least 778 (engram_num_embeddings, engram_vocab_size, engram_n_heads, engram_max_ngram_size)");
}

#[test]
fn another_count_of_compressed_ids_is_refused() {
    let config = EngramConfig {
        compressed_vocab_size: 99_092,
        ..config()
    };
    let error = TokenMap::from_tokenizer(&tokenizer(), &config).unwrap_err();
    insta::assert_snapshot!(without_dir(&error), @"DIR/tokenizer.json folds to 238 compressed ids, but engram_compressed_vocab_size is 99092: tokenizer.json and config.json do not belong together");
}

#[test]
fn a_pad_token_outside_the_vocabulary_is_refused() {
    let config = EngramConfig {
        pad_token_id: 288,
        ..config()
    };
    let error = TokenMap::from_tokenizer(&tokenizer(), &config).unwrap_err();
    insta::assert_snapshot!(without_dir(&error), @"engram_pad_token_id 288 is outside the vocabulary of DIR/tokenizer.json: expected less than 288");
}

#[test]
fn a_short_table_is_refused() {
    let map = TokenMap::from_tokenizer(&tokenizer(), &config()).unwrap();
    let config = EngramConfig {
        table_rows: vec![760, 1114],
        ..config()
    };
    let error = NgramHasher::new(&config, &map).unwrap_err();
    insta::assert_snapshot!(error, @"the engram table of layer 3 has 1114 rows, but its hash columns need at least 1115 (engram_num_embeddings, engram_vocab_size, engram_n_heads, engram_max_ngram_size)");
}

#[test]
fn an_id_without_a_token_is_an_error() {
    let error = hasher()
        .table_rows(0, &[5, 288], &[7], &mut Vec::new())
        .unwrap_err();
    assert!(matches!(
        error,
        EngramError::UnknownToken {
            id: 288,
            index: 2,
            vocab_size: 288
        }
    ));
    insta::assert_snapshot!(error, @"token id 288 at index 2 has no compressed id: the tokenizer has 288 tokens");
}
