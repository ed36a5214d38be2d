//! Models of random weights, and contexts that nobody computed: what benchmarks run on.

use std::{
    collections::BTreeMap,
    num::NonZeroU32,
    sync::{Arc, Mutex},
};

use candle_core::Tensor;
use deepseek_model::{
    CacheOptions, Config, LogitRows, Model, ModelOptions, ReplayPolicy, Runner, RunnerOptions,
    SequenceOptions, StepRequest,
};

fn config(name: &str) -> Config {
    Config::load(format!("tests/data/{name}").as_ref()).unwrap()
}

fn model(seed: u64) -> Arc<Model> {
    let model = Model::random(config("bf16-s1"), ModelOptions::default(), seed);
    model.unwrap().into()
}

const LEN: usize = 300;

fn cache(policy: ReplayPolicy) -> CacheOptions {
    CacheOptions {
        max_sequences: 1,
        max_tokens: LEN + 8,
        page_tokens: CacheOptions::PAGE_TOKENS,
        policy,
        sampled_rows: NonZeroU32::MIN,
    }
}

const PROMPT: SequenceOptions = SequenceOptions {
    prompt_len: LEN,
    keeps_rows: false,
};

fn tokens() -> Vec<u32> {
    let ids = (0..LEN as u32).map(|i| (i * 97 + i * i * 31) % 288);
    ids.collect()
}

/// Logits of the last row of a prompt.
fn prefill(model: &Arc<Model>, policy: ReplayPolicy, chunk: usize) -> Vec<f32> {
    let options = RunnerOptions::default();
    let mut runner = Runner::new(model.clone(), cache(policy), &options).unwrap();
    let sequence = runner.add(PROMPT).unwrap();
    let prompt = tokens();
    let mut logits = Vec::new();
    for (i, tokens) in prompt.chunks(chunk).enumerate() {
        let is_last = (i + 1) * chunk >= LEN;
        let request = StepRequest {
            sequence,
            tokens,
            logits: if is_last {
                LogitRows::Last
            } else {
                LogitRows::None
            },
        };
        let (output, _) = runner.forward(&[request]).unwrap();
        logits = output.logits.flatten_all().unwrap().to_vec1().unwrap();
    }
    logits
}

#[test]
fn random_logits_are_finite_under_every_policy() {
    let model = model(1);
    let off = prefill(&model, ReplayPolicy::Off, LEN);
    assert_eq!(off.len(), 288);
    for policy in ReplayPolicy::ALL {
        let logits = prefill(&model, policy, 100);
        assert!(logits.iter().all(|x| x.is_finite()), "{policy}");
        let spread = logits.iter().fold(0f32, |most, x| most.max(x.abs()));
        assert!((0.5..20.0).contains(&spread), "{policy}: {spread}");
    }
    assert_eq!(off, prefill(&model, ReplayPolicy::Off, LEN));
    assert_ne!(off, prefill(&self::model(2), ReplayPolicy::Off, LEN));
}

/// An expert that is everybody's choice, or nobody's, would make the time of a step another one.
#[test]
fn rows_choose_their_experts_evenly() {
    let model = model(1);
    let mut cache = model.new_cache(cache(ReplayPolicy::Off)).unwrap();
    let sequence = cache.add(PROMPT).unwrap();
    let counts: Mutex<BTreeMap<String, [usize; 6]>> = Mutex::default();
    let observe = |name: &str, tensor: &Tensor| {
        if name.ends_with(".experts") {
            let mut counts = counts.lock().unwrap();
            let of_layer = counts.entry(name.to_owned()).or_default();
            for expert in tensor.flatten_all().unwrap().to_vec1::<u32>().unwrap() {
                of_layer[expert as usize] += 1;
            }
        }
    };
    let request = StepRequest {
        sequence,
        tokens: &tokens(),
        logits: LogitRows::None,
    };
    let output = model.forward_observed(&[request], &mut cache, Some(&observe));
    output.unwrap();
    let counts = counts.into_inner().unwrap();
    assert_eq!(counts.len(), 9);
    for (name, counts) in counts {
        // An even share is a third of the rows.
        let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
        assert!(
            *least > LEN / 8 && *most < LEN * 2 / 3,
            "{name}: {counts:?}"
        );
    }
}

#[test]
fn a_model_with_tables_is_not_drawn() {
    let error = Model::random(config("engram-s1"), ModelOptions::default(), 1).unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("random weights: expected a model without n-gram tables"),
        "{text}"
    );
}

/// A context that nobody computed is one to decode after.
#[test]
fn an_assumed_context_is_decoded_after() {
    let options = RunnerOptions::default();
    let mut runner = Runner::new(model(1), cache(ReplayPolicy::PromptTail), &options).unwrap();
    runner.fill_random(3).unwrap();
    let sequence = runner.add(PROMPT).unwrap();
    runner.assume(sequence, LEN).unwrap();
    assert_eq!(runner.cache().len(sequence).unwrap(), LEN);
    let request = StepRequest {
        sequence,
        tokens: &[5],
        logits: LogitRows::Last,
    };
    let (output, _) = runner.forward(&[request]).unwrap();
    let logits: Vec<f32> = output.logits.flatten_all().unwrap().to_vec1().unwrap();
    assert!(logits.iter().all(|x| x.is_finite()));
    assert_eq!(runner.cache().len(sequence).unwrap(), LEN + 1);

    let error = runner.assume(sequence, 5).unwrap_err().to_string();
    assert_eq!(
        error,
        "cache: expected sequence 0.0 to have no tokens yet, it has 301"
    );
    runner.remove(sequence).unwrap();
    let sequence = runner.add(PROMPT).unwrap();
    for (len, refusal) in [(1 << 20, "exceeds the model's"), (1000, "more pages")] {
        let error = runner.assume(sequence, len).unwrap_err().to_string();
        assert!(error.contains(refusal), "{error}");
        assert_eq!(runner.cache().len(sequence).unwrap(), 0);
    }
}
