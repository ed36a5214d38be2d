//! An engine's thread: clients on many threads, clients that go away, and its end.

mod common;

use std::{
    num::{NonZeroU32, NonZeroUsize},
    sync::{
        Arc, LazyLock,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use common::load;
use deepseek_model::{
    CacheOptions, Error, Model, ReplayPolicy, RunnerOptions,
    engine::{EndReason, Engine, EngineError, EngineOptions, EngineRequest, Update},
};

static MODEL: LazyLock<Arc<Model>> = LazyLock::new(|| Arc::new(load("bf16-s1", false)));

fn start(max_waiting: usize) -> Engine {
    let options = EngineOptions {
        cache: CacheOptions {
            max_sequences: 4,
            max_tokens: 256,
            page_tokens: 8,
            policy: ReplayPolicy::Exact,
            sampled_rows: NonZeroU32::MIN,
        },
        runner: RunnerOptions::default(),
        max_step_tokens: NonZeroUsize::new(32).unwrap(),
        max_waiting,
        prefix_cache: true,
        tokenizer: None,
    };
    Engine::start(MODEL.clone(), options, |_, _| ()).unwrap()
}

fn request(seed: u32, len: u32, new: usize) -> EngineRequest {
    let prompt = (0..len).map(|i| 3 + (seed * 17 + i * 7) % 250).collect();
    EngineRequest::greedy(prompt, new)
}

fn tokens(updates: &[Update]) -> Vec<u32> {
    let token = |update: &Update| match update {
        Update::Token { id, .. } => Some(*id),
        _ => None,
    };
    updates.iter().filter_map(token).collect()
}

/// Waits until nothing waits or runs.
fn settle(engine: &Engine) {
    for _ in 0..1000 {
        let stats = engine.stats();
        if stats.waiting == 0 && stats.running == 0 {
            return;
        }
        thread::sleep(Duration::from_millis(5));
    }
    panic!("{:?}", engine.stats());
}

/// Each client gets its own text, whole, whatever the others do; those that go away in the middle
/// leave nothing behind.
#[test]
fn clients_on_many_threads() {
    let engine = start(256);
    let pages = engine.stats().free_pages;
    let texts: Vec<Vec<u32>> = (0..4)
        .map(|seed| {
            tokens(
                &engine
                    .submit(request(seed, 120, 9))
                    .unwrap()
                    .collect::<Vec<_>>(),
            )
        })
        .collect();
    assert!(texts.iter().all(|text| text.len() == 9));
    let ended = AtomicUsize::new(0);
    thread::scope(|scope| {
        for client in 0..8 {
            let (engine, texts, ended) = (&engine, &texts, &ended);
            scope.spawn(move || {
                for round in 0..12 {
                    let seed = (client + round) % 4;
                    let mut updates = engine.submit(request(seed, 120, 9)).unwrap();
                    if (client + round) % 3 == 0 {
                        // Gone after some of it, or before any of it.
                        updates.by_ref().take(round as usize % 5).for_each(drop);
                        continue;
                    }
                    let all: Vec<Update> = updates.collect();
                    assert!(matches!(all[0], Update::Started { .. }));
                    assert!(matches!(
                        all.last(),
                        Some(Update::Finished {
                            reason: EndReason::Length,
                            ..
                        })
                    ));
                    assert_eq!(tokens(&all), texts[seed as usize]);
                    ended.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(ended.into_inner(), 64);
    settle(&engine);
    assert_eq!(engine.stats().free_pages, pages);
    assert!(engine.stats().cached_tokens > 0);
}

/// As many wait as may; then the caller is told, at once.
#[test]
fn a_full_queue_pushes_back() {
    let engine = start(2);
    // The first request's updates block the thread until the queue was filled.
    let (go, gate) = mpsc::channel::<()>();
    let blocked = engine
        .submit_to(request(1, 30, 3), move |_| {
            let _ = gate.recv();
            true
        })
        .unwrap();
    while engine.stats().waiting > 0 {
        thread::yield_now();
    }
    // Three more can run, and two can wait.
    let waiting: Vec<_> = (0..5)
        .map(|i| engine.submit(request(i, 9, 2)).unwrap())
        .collect();
    let full = engine.submit(request(3, 9, 2)).unwrap_err();
    insta::assert_snapshot!(full, @"engine: 1 more than the 6 requests that are in it: expected at most 6 in all, 4 that can run (CacheOptions::max_sequences) and 2 that may wait (EngineOptions::max_waiting)");
    drop(go);
    for updates in waiting {
        assert_eq!(tokens(&updates.collect::<Vec<_>>()).len(), 2);
    }
    assert!(!blocked.load(Ordering::Relaxed));
    let again = engine.submit(request(3, 9, 2)).unwrap();
    assert_eq!(tokens(&again.collect::<Vec<_>>()).len(), 2);
}

/// Of several requests that belong together all are taken in or none, and those that are not take nobody's
/// place.
#[test]
fn requests_that_belong_together_are_taken_in_together() {
    let engine = start(1);
    let (told, updates) = mpsc::channel();
    let several = |seeds: std::ops::Range<u32>| {
        let of_seed = |seed: u32| {
            let told = told.clone();
            let sink = move |update: Update| told.send((seed, update)).is_ok();
            (request(seed, 9, 2), sink)
        };
        engine.submit_all(seeds.map(of_seed).collect())
    };
    for _ in 0..100 {
        assert!(matches!(
            several(0..6),
            Err(EngineError::Full {
                held: 0,
                asked: 6,
                ..
            })
        ));
        assert_eq!(engine.stats().waiting, 0);
    }
    assert!(updates.try_recv().is_err(), "none of them began");
    assert_eq!(several(0..5).unwrap().len(), 5);
    settle(&engine);
    let mut ended: Vec<u32> = updates
        .try_iter()
        .filter(|(_, update)| update.is_last())
        .map(|(seed, _)| seed)
        .collect();
    ended.sort_unstable();
    assert_eq!(ended, [0, 1, 2, 3, 4]);
    // A bad one among good ones.
    let silent = |_: Update| true;
    let bad = vec![(request(1, 9, 2), silent), (request(1, 0, 2), silent)];
    assert!(engine.submit_all(bad).is_err());
    assert_eq!(engine.stats().waiting, 0);
}

/// Bad requests are refused where they are made, not in the thread.
#[test]
fn bad_requests_are_refused_at_once() {
    let engine = start(2);
    let refused = |request| engine.submit(request).unwrap_err().to_string();
    assert!(refused(request(1, 0, 1)).contains("at least 1 token"));
    assert!(refused(request(1, 300, 1)).contains("the cache holds"));
    assert_eq!(engine.max_tokens(), 280);
    assert_eq!(engine.stats().waiting, 0);
}

/// Finished, an engine lets all end that it has; dropped, it tells them that it has stopped.
#[test]
fn an_engine_ends() {
    let engine = start(64);
    let updates: Vec<_> = (0..10)
        .map(|i| engine.submit(request(i, 25, 12)).unwrap())
        .collect();
    let waits = thread::spawn(move || engine.finish());
    for updates in updates {
        assert_eq!(tokens(&updates.collect::<Vec<_>>()).len(), 12);
    }
    waits.join().unwrap();

    let engine = start(64);
    let updates: Vec<_> = (0..10)
        .map(|i| engine.submit(request(i, 60, 100)).unwrap())
        .collect();
    drop(engine);
    let stopped = |updates: deepseek_model::engine::Updates| match updates.last() {
        Some(Update::Failed(error)) => matches!(*error, Error::EngineStopped),
        other => panic!("{other:?}"),
    };
    assert!(updates.into_iter().all(stopped));
}

/// A client whose sink panics is gone, and the others are served; those that wait when the engine is
/// dropped are told, by sinks as well.
#[test]
fn sinks_that_panic_and_sinks_at_the_end() {
    let engine = start(8);
    engine
        .submit_to(request(1, 9, 3), |_| panic!("a client's own fault"))
        .unwrap();
    let updates = engine.submit(request(2, 9, 3)).unwrap();
    assert_eq!(tokens(&updates.collect::<Vec<_>>()).len(), 3);
    let (told, ends) = mpsc::channel();
    for seed in 0..6 {
        let told = told.clone();
        let sink = move |update: Update| {
            if let Update::Failed(error) = update {
                told.send(matches!(*error, Error::EngineStopped)).unwrap();
            }
            true
        };
        engine.submit_to(request(seed, 60, 100), sink).unwrap();
    }
    drop((engine, told));
    assert_eq!(ends.iter().collect::<Vec<_>>(), [true; 6]);
}
