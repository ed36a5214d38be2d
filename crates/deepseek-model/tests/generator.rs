//! Generation of a batch: without cache rounding what each prompt gets depends on the others and on
//! the chunk size by summation order only, which changes no token of these texts.

mod common;

use std::{
    num::NonZeroUsize,
    sync::{Arc, LazyLock},
};

use common::{Expected, Lone, assert_close, load};
use deepseek_model::{
    Event, FinishReason, GenerateOptions, Generation, Generator, LogitRows, Model, ReplayPolicy,
    SequenceOptions,
    sampler::{SamplingConfig, log_softmax_at},
};

static DEMO: LazyLock<Arc<Model>> = LazyLock::new(|| load("v41-demo", false).into());

fn options(policy: ReplayPolicy, chunk: usize) -> GenerateOptions {
    GenerateOptions {
        policy,
        chunk: NonZeroUsize::new(chunk).unwrap(),
        max_new_tokens: 48,
        stop_ids: vec![],
        sampling: SamplingConfig::GREEDY,
        logprobs: false,
        runner: deepseek_model::RunnerOptions::default(),
    }
}

fn run(
    model: &Arc<Model>,
    prompts: &[Vec<u32>],
    options: GenerateOptions,
) -> (Vec<Generation>, Vec<Event>) {
    let mut generator = Generator::new(model.clone(), prompts.to_vec(), options).unwrap();
    let mut events = Vec::new();
    while !generator.is_finished() {
        events.extend(generator.step().unwrap());
    }
    assert_eq!(
        generator.step().unwrap(),
        [],
        "a finished generator does nothing"
    );
    (generator.results().cloned().collect(), events)
}

#[test]
fn the_demo_writes_the_references_ids_in_any_batch_and_chunking() {
    let expected = Expected::load("v41-demo");
    let tokens = expected.ids("tokens");
    let other = tokens[100..190].to_vec();
    for (mode, policy) in [
        ("off", ReplayPolicy::Off),
        ("bounded", ReplayPolicy::PromptTail),
        ("exact", ReplayPolicy::Exact),
    ] {
        let want = expected.ids(&format!("plain.{mode}.ids"));
        for chunk in [4096, 128, 37] {
            let (results, _) = run(
                &DEMO,
                &[other.clone(), tokens.clone()],
                options(policy, chunk),
            );
            assert_eq!(results[1].ids, want, "{mode}, chunk {chunk}");
            assert_eq!(results[1].finish, Some(FinishReason::Length));
        }
    }
}

#[test]
fn events_tell_all_that_happens() {
    let expected = Expected::load("v41-demo");
    let prompt = expected.ids("tokens")[..100].to_vec();
    let mut options = options(ReplayPolicy::PromptTail, 64);
    options.max_new_tokens = 5;
    let (results, events) = run(&DEMO, std::slice::from_ref(&prompt), options.clone());
    let ids: Vec<u32> = events
        .iter()
        .filter_map(|e| {
            if let Event::Token { id, .. } = e {
                Some(*id)
            } else {
                None
            }
        })
        .collect();
    assert_eq!(ids, results[0].ids);
    assert_eq!(
        events[0],
        Event::Prefilled {
            prompt: 0,
            done: 64,
            total: 100
        }
    );
    assert_eq!(
        events[1],
        Event::Prefilled {
            prompt: 0,
            done: 100,
            total: 100
        }
    );
    assert_eq!(
        *events.last().unwrap(),
        Event::Finished {
            prompt: 0,
            reason: FinishReason::Length
        }
    );

    // The third id as a stop id: it ends the generation and is not part of it.
    options.stop_ids = vec![ids[2]];
    let end = ids.iter().position(|id| *id == ids[2]).unwrap();
    let (results, _) = run(&DEMO, std::slice::from_ref(&prompt), options.clone());
    assert_eq!(
        (results[0].ids.as_slice(), results[0].finish),
        (&ids[..end], Some(FinishReason::Stop))
    );

    options.max_new_tokens = 0;
    let (results, _) = run(&DEMO, &[prompt], options);
    assert_eq!(
        (results[0].ids.len(), results[0].finish),
        (0, Some(FinishReason::Length))
    );
}

/// Log-probabilities of prompt and output against the logits of an unbatched, unchunked run.
#[test]
fn log_probabilities_are_those_of_every_row() {
    let tokens = Expected::load("v41-demo").ids("tokens")[..70].to_vec();
    let mut options = options(ReplayPolicy::PromptTail, 32);
    (options.logprobs, options.max_new_tokens) = (true, 3);
    let (results, _) = run(&DEMO, &[tokens[..9].to_vec(), tokens.clone()], options);
    let keeps = SequenceOptions {
        prompt_len: 70,
        keeps_rows: true,
    };
    let mut lone = Lone::with(&DEMO, ReplayPolicy::PromptTail, keeps);
    let rows = lone.step(&tokens, LogitRows::All);
    let vocab = DEMO.config().vocab_size;
    let row = |i: usize| &rows[i * vocab..(i + 1) * vocab];
    let want: Vec<f32> = (0..69)
        .map(|i| log_softmax_at(row(i), tokens[i + 1]).unwrap())
        .collect();
    assert_close("prompt", &results[1].prompt_logprobs, &want, 1e-3);
    assert_eq!(results[1].logprobs.len(), 3);
    assert_close(
        "first",
        &results[1].logprobs[..1],
        &[log_softmax_at(row(69), results[1].ids[0]).unwrap()],
        1e-3,
    );
}

/// A seed means the same draws whatever a prompt is packed with. Here the logits are near enough to
/// each other that they give the same text.
#[test]
fn sampling_does_not_depend_on_the_batch() {
    let tokens = Expected::load("v41-demo").ids("tokens");
    let prompts = [
        tokens[..60].to_vec(),
        tokens[..60].to_vec(),
        tokens[200..231].to_vec(),
    ];
    let mut options = options(ReplayPolicy::PromptTail, 50);
    options.sampling = SamplingConfig {
        temperature: 0.8,
        top_k: Some(40),
        top_p: 0.95,
        seed: 7,
    };
    let (packed, _) = run(&DEMO, &prompts, options.clone());
    let (alone, _) = run(&DEMO, &prompts[..1], options.clone());
    assert_eq!(packed[0].ids, alone[0].ids);
    assert_ne!(
        packed[0].ids, packed[1].ids,
        "equal prompts draw from streams of their own"
    );
    options.sampling.seed = 8;
    assert_ne!(run(&DEMO, &prompts[..1], options).0[0].ids, alone[0].ids);
}
