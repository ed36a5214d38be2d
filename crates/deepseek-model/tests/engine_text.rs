//! The text of an engine's updates, and stop texts in it.

mod common;

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock},
    thread,
    time::{Duration, Instant},
};

use common::{
    checkpoint,
    schedules::{engine_options, prompt, short_windows},
};
use deepseek_model::{
    Model, ModelOptions, ReplayPolicy,
    engine::{EndReason, EngineCore, EngineRequest, RequestId, Update},
    sampler::SamplingConfig,
    tokenizer::Tokenizer,
};
use proptest::prelude::*;

static MODEL: LazyLock<Arc<Model>> = LazyLock::new(|| {
    let model = Model::random(short_windows(), ModelOptions::default(), 1);
    Arc::new(model.unwrap())
});

static TOKENIZER: LazyLock<Arc<Tokenizer>> =
    LazyLock::new(|| Arc::new(Tokenizer::load(checkpoint("bf16-s1")).unwrap()));

fn engine(pages: usize) -> EngineCore {
    let mut options = engine_options(ReplayPolicy::PromptTail, pages, false);
    options.tokenizer = Some(TOKENIZER.clone());
    EngineCore::new(MODEL.clone(), options).unwrap()
}

/// A text of bytes at random, many of them no characters.
fn request(seed: u64, len: usize, new: usize) -> EngineRequest {
    let mut request = EngineRequest::greedy(prompt(0, 0, seed as u32, len), new);
    request.sampling = SamplingConfig {
        temperature: 1.0,
        seed,
        ..SamplingConfig::GREEDY
    };
    request
}

/// What came of a request.
#[derive(Debug, Default)]
struct Outcome {
    ids: Vec<u32>,
    /// Text by the token that it came with, and what came at the end.
    texts: Vec<String>,
    end: Option<EndReason>,
}

fn collect(outcomes: &mut HashMap<RequestId, Outcome>, updates: Vec<(RequestId, Update)>) {
    for (id, update) in updates {
        let outcome = outcomes.entry(id).or_default();
        match update {
            Update::Token { id, text, .. } => {
                outcome.ids.push(id);
                outcome.texts.push(text);
            }
            Update::Finished { reason, text } => {
                outcome.texts.push(text);
                outcome.end = Some(reason);
            }
            Update::Started { .. } => {}
            other => panic!("{id}: {other:?}"),
        }
    }
}

/// Outcomes of all requests, in order, and how often one lost its room.
fn run(pages: usize, requests: &[EngineRequest]) -> (Vec<Outcome>, u64) {
    let mut engine = engine(pages);
    let submit = |request: &EngineRequest| engine.submit(request.clone()).unwrap();
    let ids: Vec<_> = requests.iter().map(submit).collect();
    let mut outcomes = HashMap::new();
    while !engine.is_idle() {
        collect(&mut outcomes, engine.step());
    }
    let outcomes = ids.iter().map(|id| outcomes.remove(id).unwrap()).collect();
    (outcomes, engine.stats().preemptions)
}

/// The stop text that ends a text, by a search of all of it: where it begins, and which one.
fn earliest(text: &str, stops: &[String]) -> Option<(usize, usize)> {
    let found = |(index, stop): (usize, &String)| Some((text.find(stop)?, stop.len(), index));
    let first = stops.iter().enumerate().filter_map(found).min();
    first.map(|(at, _, index)| (at, index))
}

/// All that an outcome's texts promise: together the text of its tokens, up to the earliest stop text;
/// and the request went on no longer than it took to know.
#[track_caller]
fn check(request: &EngineRequest, outcome: &Outcome) {
    let decode = |ids: &[u32]| TOKENIZER.decode(ids).unwrap();
    let (text, stops) = (decode(&outcome.ids), &request.stop_texts);
    let first = earliest(&text, stops);
    let want = &text[..first.map_or(text.len(), |(at, _)| at)];
    assert_eq!(outcome.texts.concat(), want, "{stops:?} in {text:?}");
    let full = outcome.ids.len() == request.max_new_tokens;
    match first {
        Some((_, index)) => assert_eq!(outcome.end, Some(EndReason::StopText { index })),
        None => assert_eq!((outcome.end, full), (Some(EndReason::Length), true)),
    }
    if let ([before @ .., _], Some(_)) = (&outcome.ids[..], first) {
        // One token less, and the text could still have ended elsewhere.
        let before = decode(before);
        let before = before.trim_end_matches(char::REPLACEMENT_CHARACTER);
        let may_go_on = |from: usize| stops.iter().any(|stop| stop.starts_with(&before[from..]));
        let mut starts = before.char_indices().map(|(from, _)| from);
        assert!(
            earliest(before, stops)
                .is_none_or(|(at, _)| starts.any(|from| from < at && may_go_on(from))),
            "{stops:?} in {text:?}: one token too many"
        );
    }
    if stops.is_empty() {
        let mut given = String::new();
        for (last, text) in outcome.texts[..outcome.ids.len()].iter().enumerate() {
            given += text;
            let whole = decode(&outcome.ids[..=last]);
            let whole = whole.trim_end_matches(char::REPLACEMENT_CHARACTER);
            assert!(given.starts_with(whole), "more than half a character waits");
        }
    }
}

/// The characters of a text from one on, so many of them.
fn part(text: &str, from: usize, len: usize) -> String {
    let count = text.chars().count().max(1);
    text.chars().skip(from % count).take(len).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Parts of the texts that come without stop texts, ended by other characters now and then so that
    /// only their beginnings appear; a cache in which requests lose their room.
    #[test]
    fn texts_end_at_the_earliest_stop_text(
        asked in prop::collection::vec(
            (any::<u64>(), 1usize..30, 0usize..12, prop::collection::vec(
                (any::<usize>(), 1usize..6, any::<bool>()), 0..4,
            )),
            1..6,
        ),
        pages in 8usize..16,
    ) {
        let mut requests: Vec<_> = asked.iter().map(|&(seed, len, new, _)| request(seed, len, new)).collect();
        let (free, _) = run(pages, &requests);
        for ((request, outcome), asked) in requests.iter_mut().zip(&free).zip(&asked) {
            check(request, outcome);
            let text = TOKENIZER.decode(&outcome.ids).unwrap();
            for &(from, len, whole) in &asked.3 {
                let end = if whole { "" } else { "§" };
                request.stop_texts.push(part(&text, from, len) + end);
            }
            request.stop_texts.retain(|stop| !stop.is_empty());
        }
        let (outcomes, _) = run(pages, &requests);
        for (request, outcome) in requests.iter().zip(&outcomes) {
            check(request, outcome);
        }
    }
}

/// A request that is computed again gives each piece of its text once, also the piece that it held back
/// when it lost its room.
#[test]
fn losing_room_loses_and_doubles_no_text() {
    let mut requests: Vec<_> = (0..6).map(|seed| request(seed, 30, 11)).collect();
    // Two prompts fill 8 pages, and with their texts 10.
    let (free, preemptions) = run(9, &requests);
    assert!(preemptions > 0);
    for (request, outcome) in requests.iter_mut().zip(&free) {
        check(request, outcome);
        // All of the text waits for the end of it, which does not come.
        let text = TOKENIZER.decode(&outcome.ids).unwrap();
        request.stop_texts = vec![text + "§"];
    }
    let (held, preemptions) = run(9, &requests);
    assert!(preemptions > 0);
    for (request, outcome) in requests.iter().zip(&held) {
        check(request, outcome);
        assert!(outcome.texts.len() == 12 && outcome.texts[5].is_empty());
    }
}

/// A stop text in the prompt, or half in it, ends nothing.
#[test]
fn the_prompt_is_not_searched() {
    let mut asks = EngineRequest::greedy(TOKENIZER.encode("To-morrow, and to").unwrap(), 4);
    let (free, _) = run(16, std::slice::from_ref(&asks));
    let text = TOKENIZER.decode(&free[0].ids).unwrap();
    let half = String::from("to") + &part(&text, 0, 1);
    assert!(
        !text.contains("morrow") && !text.contains(&half),
        "{text:?}"
    );
    asks.stop_texts = vec![String::from("morrow"), half];
    let (outcomes, _) = run(16, std::slice::from_ref(&asks));
    assert_eq!(outcomes[0].end, Some(EndReason::Length));
    check(&asks, &outcomes[0]);
}

/// The text that was held back comes with the end of a request that is too late, too.
#[test]
fn a_deadline_gives_what_was_held_back() {
    let mut engine = engine(16);
    let free = request(3, 10, 40);
    let (outcomes, _) = run(16, std::slice::from_ref(&free));
    let mut late = free;
    late.stop_texts = vec![TOKENIZER.decode(&outcomes[0].ids).unwrap() + "§"];
    let deadline = Instant::now() + Duration::from_millis(300);
    late.deadline = Some(deadline);
    let id = engine.submit(late).unwrap();
    let mut outcomes = HashMap::new();
    for _ in 0..5 {
        collect(&mut outcomes, engine.step());
    }
    thread::sleep(deadline.saturating_duration_since(Instant::now()));
    while !engine.is_idle() {
        collect(&mut outcomes, engine.step());
    }
    let late = &outcomes[&id];
    assert_eq!(late.end, Some(EndReason::Deadline));
    assert_eq!(late.texts.concat(), TOKENIZER.decode(&late.ids).unwrap());
}
