//! Steps, caches and options that are refused: by name, and before anything has changed.

mod common;

use std::{
    fmt::Write,
    sync::{Arc, LazyLock},
};

use common::{Lone, checkpoint, load};
use deepseek_model::{
    CacheOptions, GenerateOptions, Generator, KvCache, LogitRows, Model, ModelOptions,
    ReplayPolicy, SequenceOptions, StepRequest, sampler::SamplingConfig,
};

static MODEL: LazyLock<Arc<Model>> = LazyLock::new(|| load("bf16-s1", false).into());

const OPTIONS: CacheOptions = CacheOptions {
    max_sequences: 2,
    max_tokens: 128,
    page_tokens: CacheOptions::PAGE_TOKENS,
    policy: ReplayPolicy::PromptTail,
    sampled_rows: std::num::NonZeroU32::MIN,
};
const PROMPT: SequenceOptions = SequenceOptions {
    prompt_len: 20,
    keeps_rows: false,
};

/// Collects `what: error` lines for one snapshot.
#[derive(Default)]
struct Texts(String);

impl Texts {
    fn add<T>(&mut self, what: &str, result: deepseek_model::Result<T>) {
        let error = result
            .err()
            .unwrap_or_else(|| panic!("{what} was not refused"));
        let error = without_memory(&error.to_string());
        writeln!(self.0, "{what}\n    {error}").unwrap();
    }
}

/// A text without the size of the memory that this machine has left, and what fits there.
fn without_memory(text: &str) -> String {
    let text = without(
        text,
        "expected at most the ",
        " that are available",
        "MEMORY",
    );
    // A machine may have room for none.
    let text = text.replace("; none would fit", "; 0 tokens would fit");
    without(&text, " that are available; ", " tokens would fit", "SOME")
}

/// A text with a `name` for what lies between two others, where they are.
fn without(text: &str, before: &str, after: &str, name: &str) -> String {
    let Some((start, rest)) = text.split_once(before) else {
        return text.to_owned();
    };
    match rest.split_once(after) {
        Some((_, end)) => format!("{start}{before}{name}{after}{end}"),
        None => text.to_owned(),
    }
}

#[test]
fn refused_steps_say_why_and_change_nothing() {
    let mut cache = MODEL.new_cache(OPTIONS).unwrap();
    let a = cache.add(PROMPT).unwrap();
    let gone = cache.add(PROMPT).unwrap();
    cache.remove(gone).unwrap();
    let b = cache
        .add(SequenceOptions {
            prompt_len: 300,
            keeps_rows: false,
        })
        .unwrap();
    let tokens: Vec<u32> = (3..303).map(|t| 3 + t % 280).collect();
    let request = |sequence, n: usize, logits| StepRequest {
        sequence,
        tokens: &tokens[..n],
        logits,
    };
    let outside = [3, 4, 288];
    let steps: Vec<(&str, Vec<StepRequest<'_>>)> = vec![
        ("no request", vec![]),
        ("no tokens", vec![request(a, 0, LogitRows::None)]),
        (
            "one sequence twice",
            vec![
                request(b, 4, LogitRows::None),
                request(a, 2, LogitRows::None),
                request(b, 4, LogitRows::None),
            ],
        ),
        (
            "a removed sequence whose slot is in use again",
            vec![request(gone, 4, LogitRows::None)],
        ),
        (
            "an id outside the vocabulary",
            vec![StepRequest {
                sequence: a,
                tokens: &outside,
                logits: LogitRows::None,
            }],
        ),
        (
            "a chunk over the prompt's end",
            vec![request(a, 21, LogitRows::Last)],
        ),
        (
            "the last row of a chunk that is not the last",
            vec![request(a, 12, LogitRows::Last)],
        ),
        (
            "all rows of a prompt that keeps none",
            vec![request(a, 20, LogitRows::All)],
        ),
        (
            "more pages than there are",
            vec![request(b, 300, LogitRows::None)],
        ),
    ];
    let mut texts = Texts::default();
    for (what, step) in steps {
        texts.add(what, MODEL.forward(&step, &mut cache));
        assert_eq!(
            (cache.len(a).unwrap(), cache.len(b).unwrap()),
            (0, 0),
            "{what} changed the cache"
        );
    }
    let last = MODEL
        .forward(&[request(a, 20, LogitRows::Last)], &mut cache)
        .unwrap();
    let mut lone = Lone::new(&MODEL, ReplayPolicy::PromptTail, 20);
    assert_eq!(
        common::flat(&last.logits),
        lone.prefill(&tokens[..20], &[20]),
        "a refused step left a trace"
    );
    let other = load("engram-s1", false);
    let mut other = other.new_cache(OPTIONS).unwrap();
    let step = [request(other.add(PROMPT).unwrap(), 4, LogitRows::None)];
    texts.add("a cache of another model", MODEL.forward(&step, &mut other));
    insta::assert_snapshot!(texts.0);
}

/// The weights of a fixture with the configuration of another.
fn loaded_with(weights: &str, config: &str) -> Model {
    let dir = tempfile::TempDir::new().unwrap();
    for file in std::fs::read_dir(checkpoint(weights)).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    let file = "config.json";
    std::fs::copy(checkpoint(config).join(file), dir.path().join(file)).unwrap();
    Model::load(dir.path(), ModelOptions::default(), &|_| {}).unwrap()
}

/// Checkpoints of one configuration have caches of one shape: a text begun by one and continued by
/// the other would come out as nonsense, and no word about it.
#[test]
fn a_cache_of_other_weights_is_refused() {
    let other = loaded_with("fp4-s1", "bf16-s1");
    assert_eq!(MODEL.config(), other.config());
    let again = load("bf16-s1", false);
    let (device, dtype) = (candle_core::Device::Cpu, candle_core::DType::F32);
    let step = |sequence| {
        [StepRequest {
            sequence,
            tokens: &[5, 6, 7],
            logits: LogitRows::None,
        }]
    };
    let mut texts = Texts::default();
    let mut cache = MODEL.new_cache(OPTIONS).unwrap();
    let id = cache.add(PROMPT).unwrap();
    texts.add("other weights", other.forward(&step(id), &mut cache));
    texts.add("loaded twice", again.forward(&step(id), &mut cache));
    MODEL.forward(&step(id), &mut cache).unwrap();

    // Made for no model: the first step decides, if it runs.
    let mut cache = KvCache::new(MODEL.config(), OPTIONS, &device, dtype).unwrap();
    let id = cache.add(PROMPT).unwrap();
    other.forward(&[], &mut cache).unwrap_err();
    MODEL.forward(&step(id), &mut cache).unwrap();
    texts.add("after a step", other.forward(&step(id), &mut cache));
    assert_eq!(cache.len(id).unwrap(), 3);
    MODEL.forward(&step(id), &mut cache).unwrap();
    insta::assert_snapshot!(texts.0, @r"
    other weights
        cache: it belongs to another model of the same configuration
    loaded twice
        cache: it belongs to another model of the same configuration
    after a step
        cache: it belongs to another model of the same configuration
    ");
}

/// Slots and generations of two caches of one model are the same numbers: without more, an id of
/// one would name a sequence of the other, and its step would extend the wrong text.
#[test]
fn an_id_of_another_cache_is_refused_everywhere() {
    let mut cache = MODEL.new_cache(OPTIONS).unwrap();
    let mut other = MODEL.new_cache(OPTIONS).unwrap();
    let (own, foreign) = (cache.add(PROMPT).unwrap(), other.add(PROMPT).unwrap());
    assert_eq!(own.to_string(), foreign.to_string());
    assert_ne!(own, foreign);

    let mut texts = Texts::default();
    let tokens = [5, 6, 7];
    let request = |sequence| StepRequest {
        sequence,
        tokens: &tokens,
        logits: LogitRows::None,
    };
    let step = [request(own), request(foreign)];
    texts.add("a step", MODEL.forward(&step, &mut cache));
    texts.add("its length", cache.len(foreign));
    texts.add("its window KV", cache.window_kv(foreign, 0));
    texts.add("its compressed KV", cache.compressed(foreign, 2));
    texts.add("removing it", cache.remove(foreign));
    assert_eq!(
        (cache.len(own).unwrap(), other.len(foreign).unwrap()),
        (0, 0)
    );

    drop(other);
    texts.add("after its cache is gone", cache.len(foreign));
    texts.add("a layer too many", cache.window_kv(own, 9));
    texts.add("a layer too many", cache.compressed(own, 9));
    texts.add("a layer that is no KV source", cache.compressed(own, 3));
    insta::assert_snapshot!(texts.0);
}

/// Pages that a removed sequence kept would be missing until the cache is full of nothing: here, at
/// the second sequence, which needs every page there is.
#[test]
fn pages_of_a_removed_sequence_are_free_again() {
    let mut cache = MODEL.new_cache(OPTIONS).unwrap();
    let tokens: Vec<u32> = (0..256).map(|t| 3 + t % 280).collect();
    let prompt = SequenceOptions {
        prompt_len: 256,
        keeps_rows: false,
    };
    for _ in 0..3 {
        let sequence = cache.add(prompt).unwrap();
        let step = [StepRequest {
            sequence,
            tokens: &tokens,
            logits: LogitRows::Last,
        }];
        MODEL.forward(&step, &mut cache).unwrap();
        cache.remove(sequence).unwrap();
    }
    // No page was given back twice: then two sequences would share it.
    let a = cache.add(prompt).unwrap();
    let b = cache.add(prompt).unwrap();
    let request = |sequence| StepRequest {
        sequence,
        tokens: &tokens,
        logits: LogitRows::None,
    };
    MODEL.forward(&[request(a)], &mut cache).unwrap();
    let mut texts = Texts::default();
    texts.add("full", MODEL.forward(&[request(b)], &mut cache));
    insta::assert_snapshot!(texts.0, @r"
    full
        cache: the step needs 2 more pages of 128 tokens, has 0 free (CacheOptions::max_tokens)
    ");
}

/// Ids are passed by value, one a request and step.
#[test]
fn an_id_is_small() {
    assert!(size_of::<deepseek_model::SequenceId>() <= 16);
}

#[test]
fn refused_caches_and_sequences_say_why() {
    let mut texts = Texts::default();
    let (device, dtype) = (candle_core::Device::Cpu, candle_core::DType::F32);
    texts.add(
        "no sequences",
        KvCache::new(
            MODEL.config(),
            CacheOptions {
                max_sequences: 0,
                ..OPTIONS
            },
            &device,
            dtype,
        ),
    );
    texts.add(
        "no tokens",
        KvCache::new(
            MODEL.config(),
            CacheOptions {
                max_tokens: 0,
                page_tokens: CacheOptions::PAGE_TOKENS,
                ..OPTIONS
            },
            &device,
            dtype,
        ),
    );
    for dtype in [candle_core::DType::BF16, candle_core::DType::U8] {
        let cache = KvCache::new(MODEL.config(), OPTIONS, &device, dtype);
        texts.add("a dtype that the device does not compute with", cache);
    }
    for (what, max_sequences, max_tokens) in [
        ("sequences without end", usize::MAX, 128),
        ("tokens without end", 2, usize::MAX),
        ("both without end", usize::MAX, usize::MAX),
        ("rows that have no number", u32::MAX as usize, 128),
    ] {
        let options = CacheOptions {
            max_sequences,
            max_tokens,
            page_tokens: CacheOptions::PAGE_TOKENS,
            ..OPTIONS
        };
        texts.add(what, KvCache::new(MODEL.config(), options, &device, dtype));
    }
    let mut wide = MODEL.config().clone();
    wide.head_dim = (1 << 31) - 32;
    let options = CacheOptions {
        max_tokens: 1 << 20,
        page_tokens: CacheOptions::PAGE_TOKENS,
        ..OPTIONS
    };
    texts.add(
        "more than any memory",
        KvCache::new(&wide, options, &device, dtype),
    );
    let mut cache = MODEL.new_cache(OPTIONS).unwrap();
    texts.add(
        "an empty prompt",
        cache.add(SequenceOptions {
            prompt_len: 0,
            keeps_rows: false,
        }),
    );
    texts.add(
        "a prompt over the positions",
        cache.add(SequenceOptions {
            prompt_len: 1025,
            keeps_rows: false,
        }),
    );
    cache.add(PROMPT).unwrap();
    let second = cache.add(PROMPT).unwrap();
    texts.add("a sequence too many", cache.add(PROMPT));
    cache.remove(second).unwrap();
    texts.add("removing twice", cache.remove(second));
    insta::assert_snapshot!(texts.0);
}

#[test]
fn refused_models_say_why() {
    let mut texts = Texts::default();
    let load = |options| Model::load(&checkpoint("bf16-s1"), options, &|_| {});
    let dtype = candle_core::DType::F16;
    texts.add(
        "f16 activations",
        load(ModelOptions {
            dtype,
            ..Default::default()
        }),
    );
    // One token more than the embedding has rows.
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "tokenizer.json"] {
        let text = std::fs::read_to_string(checkpoint("engram-s1").join(name)).unwrap();
        let text = text.replace("\"vocab_size\": 288", "\"vocab_size\": 287");
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    let model = Model::load(dir.path(), ModelOptions::default(), &|_| {});
    texts.add("a tokenizer of another model", model);
    let text = texts.0.replace(dir.path().to_str().unwrap(), "DIR");
    insta::assert_snapshot!(text);
}

/// A long generation ends at the model's last position, not with an error.
#[test]
fn generation_stops_at_the_last_position() {
    let prompt: Vec<u32> = (0..1020).map(|t| 3 + t % 280).collect();
    let options = GenerateOptions {
        policy: ReplayPolicy::PromptTail,
        chunk: std::num::NonZeroUsize::new(512).unwrap(),
        max_new_tokens: 50,
        stop_ids: vec![],
        sampling: SamplingConfig::GREEDY,
        logprobs: false,
        runner: deepseek_model::RunnerOptions::default(),
    };
    let mut generator = Generator::new(MODEL.clone(), vec![prompt], options).unwrap();
    while !generator.is_finished() {
        generator.step().unwrap();
    }
    let result = generator.results().next().unwrap();
    // Positions 1020 to 1023 are computed, and the row at 1023 still gives a token.
    assert_eq!(result.ids.len(), 5);
    assert_eq!(result.finish, Some(deepseek_model::FinishReason::Positions));
}
