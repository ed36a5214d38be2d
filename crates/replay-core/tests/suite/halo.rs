//! `Exact` by brute force: on small models, every row that is needed runs, and no other.
//!
//! The dependency graph is built from the definition of window attention and knows nothing of the
//! formula that plans follow.

use std::collections::BTreeSet;

use replay_core::ReplayPolicy;

use crate::models::planner;
use crate::symbolic::Schedule;

/// A row in a replay layer: (layer, position).
type Node = (u32, u32);

/// The model and what is asked of it.
#[derive(Clone, Copy, Debug)]
struct Graph {
    window: u32,
    /// Layers after the cut; the last replay layer.
    depth: u32,
    prompt_len: u32,
    sampled_rows: u32,
    /// First position with window KV.
    replay_start: u32,
    decode_steps: u32,
}

impl Graph {
    /// The outputs of the last layer that are read.
    fn demanded(&self) -> impl Iterator<Item = Node> + use<> {
        let first = self
            .prompt_len
            .saturating_sub(self.sampled_rows)
            .max(self.replay_start);
        let depth = self.depth;
        (first..self.prompt_len + self.decode_steps).map(move |x| (depth, x))
    }

    /// The rows of the layer before whose outputs the row's window KV is made of.
    fn reads(&self, (layer, x): Node) -> impl Iterator<Item = Node> + use<> {
        let first = (x + 1).saturating_sub(self.window).max(self.replay_start);
        let before = layer.checked_sub(1);
        (first..=x).filter_map(move |y| before.map(|layer| (layer, y)))
    }

    /// Everything that the demanded outputs depend on.
    fn needed(&self) -> BTreeSet<Node> {
        let mut needed = BTreeSet::new();
        let mut open: Vec<Node> = self.demanded().collect();
        while let Some(node) = open.pop() {
            if needed.insert(node) {
                open.extend(self.reads(node));
            }
        }
        needed
    }

    /// Whether every demanded output is right when only these rows run: a row is right when it runs
    /// and all that it reads is right.
    fn is_right(&self, ran: &BTreeSet<Node>) -> bool {
        let mut right = BTreeSet::new();
        for &node in ran {
            // Ascending by layer, so what the node reads has been decided.
            if self.reads(node).all(|read| right.contains(&read)) {
                right.insert(node);
            }
        }
        self.demanded().all(|node| right.contains(&node))
    }

    /// What plans run of the prompt and of the decode steps, in chunks.
    fn planned(&self, chunks: &[u32]) -> BTreeSet<Node> {
        let schedule = Schedule {
            prompt_len: self.prompt_len,
            replay_start: self.replay_start,
            chunks: chunks.iter().map(|&length| (length, false)).collect(),
            decode_steps: self.decode_steps,
            keeps_rows: false,
        };
        let planner = planner(
            ReplayPolicy::Exact,
            self.window,
            self.depth,
            self.sampled_rows,
        );
        schedule.run(&planner).ran.into_iter().collect()
    }

    #[track_caller]
    fn check(&self, chunks: &[u32]) {
        let ran = self.planned(chunks);
        assert_eq!(ran, self.needed(), "{self:?} in chunks {chunks:?}");
        assert!(self.is_right(&ran), "{self:?} in chunks {chunks:?}");
        for node in &ran {
            let mut fewer = ran.clone();
            fewer.remove(node);
            assert!(
                !self.is_right(&fewer),
                "{self:?} in chunks {chunks:?}: {node:?} is not needed"
            );
        }
    }
}

/// Every way to cut `rows` rows into chunks.
fn chunkings(rows: u32) -> Vec<Vec<u32>> {
    (0..1u32 << (rows - 1))
        .map(|cuts| {
            let mut chunks = vec![1];
            for row in 1..rows {
                if cuts >> (row - 1) & 1 == 1 {
                    chunks.push(1);
                } else {
                    *chunks.last_mut().expect("one chunk") += 1;
                }
            }
            chunks
        })
        .collect()
}

/// Windows of 1 to 4, up to 3 layers past the cut, prompts of up to 8 rows in every chunking, with
/// and without a prefix hit, and with decode steps for the window to roll over.
#[test]
fn every_needed_row_runs_and_no_other() {
    let mut checked = 0;
    for (window, depth, sampled_rows) in
        (1..=4).flat_map(|w| (1..=3).flat_map(move |d| (1..=w + 1).map(move |r| (w, d, r))))
    {
        for (rows, replay_start) in (1..=8).flat_map(|rows| [(rows, 0), (rows, 5)]) {
            let prompt_len = replay_start + rows;
            let decode_steps = window + 1;
            let graph = Graph {
                window,
                depth,
                prompt_len,
                sampled_rows,
                replay_start,
                decode_steps,
            };
            for chunks in chunkings(rows) {
                graph.check(&chunks);
                checked += 1;
            }
        }
    }
    assert_eq!(checked, 21_420);
}

/// Prompts long enough for the whole taper, at, below and just above every length at which a layer
/// starts to drop rows.
#[test]
fn the_taper_is_tight_in_long_prompts() {
    for (window, depth) in [(4, 3), (5, 4), (8, 2)] {
        let longest = 1 + (depth + 1) * (window - 1) + 2;
        for prompt_len in 1..=longest {
            let graph = Graph {
                window,
                depth,
                prompt_len,
                sampled_rows: 1,
                replay_start: 0,
                decode_steps: window,
            };
            graph.check(&[prompt_len]);
            graph.check(&vec![1; prompt_len as usize]);
        }
    }
}

/// The checker itself notices a row that is missing and a row too many.
#[test]
fn the_checker_tells_right_from_wrong() {
    let graph = Graph {
        window: 3,
        depth: 2,
        prompt_len: 12,
        sampled_rows: 1,
        replay_start: 0,
        decode_steps: 2,
    };
    let needed = graph.needed();
    assert!(graph.is_right(&needed));
    for node in &needed {
        let mut fewer = needed.clone();
        fewer.remove(node);
        assert!(!graph.is_right(&fewer));
    }
    let mut more = needed;
    more.insert((0, 0));
    assert!(graph.is_right(&more));
    more.remove(&(0, 0));
    assert_eq!(more, graph.needed());
}
