//! A model whose values are the history of how they came about, run by plans.
//!
//! A row's output in a replay layer is a hash of its input and of every window KV it reads, with the
//! position of each; window KV is a hash of the row's input in that layer. So two runs give equal
//! outputs exactly when they depend on the same things in the same way, whatever the chunks, graphs
//! and batches. A read of window KV that was never written is a panic: in a real cache it is another
//! request's data.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

use replay_core::{GraphMode, LayerRows, Planner, Position, Request, RowCount, StepPlan};

/// The history of a value.
pub(crate) type History = u64;

fn history(parts: impl Hash) -> History {
    let mut hasher = DefaultHasher::new();
    parts.hash(&mut hasher);
    hasher.finish()
}

/// One sequence and the window KV of its replay layers.
#[derive(Clone, Default)]
pub(crate) struct Sequence {
    /// Per replay layer, window KV by position.
    kv: Vec<HashMap<u32, History>>,
    /// Outputs of the last layer, by position: the latest of each.
    pub(crate) outputs: BTreeMap<u32, History>,
    /// Row-layers that ran: (layer, position).
    pub(crate) ran: Vec<(u32, u32)>,
}

/// Plans one step and runs it on the sequences of its requests.
pub(crate) fn step(
    planner: &Planner,
    mode: GraphMode,
    requests: &[Request],
    sequences: &mut [&mut Sequence],
) -> StepPlan {
    let mut plan = StepPlan::new();
    planner
        .plan_step(mode, requests, &mut plan)
        .expect("a plan");
    for (r, sequence) in sequences.iter_mut().enumerate() {
        // What the layers before the cut put out: they run on every row.
        let mut rows: BTreeMap<u32, History> = (requests[r].start()..requests[r].seq_len)
            .map(|x| (x, history(("embedding", x))))
            .collect();
        for (i, layer) in plan.layers().enumerate() {
            rows = sequence.run_layer(planner, i as u32, r, &requests[r], &layer, &rows);
        }
        sequence.outputs.extend(rows);
    }
    plan
}

impl Sequence {
    fn run_layer(
        &mut self,
        planner: &Planner,
        layer: u32,
        r: usize,
        request: &Request,
        plan: &LayerRows<'_>,
        inputs: &BTreeMap<u32, History>,
    ) -> BTreeMap<u32, History> {
        let seq_len = request.seq_len;
        let suffix = |n: RowCount| seq_len - n.get()..seq_len;
        self.kv
            .resize_with(self.kv.len().max(layer as usize + 1), HashMap::new);
        let kv = &mut self.kv[layer as usize];

        for x in suffix(plan.entering.n_rows_of(r)) {
            kv.insert(x, history(("kv", layer, x, inputs[&x])));
        }
        let kv_start = Position::new(plan.kv_start[r]);
        assert!(kv_start.get() <= seq_len, "a negative length of window KV");
        suffix(plan.running.n_rows_of(r))
            .map(|x| {
                self.ran.push((layer, x));
                let keys = planner.config().window.keys(Position::new(x), kv_start);
                assert!(keys.contains(&x) && keys.start >= request.replay_start);
                let read: Vec<(u32, History)> = keys
                    .map(|y| {
                        let Some(&value) = kv.get(&y) else {
                            panic!("layer {layer}, row {x}: window KV at {y} was never written")
                        };
                        (y, value)
                    })
                    .collect();
                (x, history((layer, inputs[&x], read)))
            })
            .collect()
    }
}

/// How one sequence is computed.
#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    /// Length of the prompt.
    pub(crate) prompt_len: u32,
    /// Where the first chunk starts: above 0 after a prefix hit.
    pub(crate) replay_start: u32,
    /// Lengths of the prefill chunks, each with whether a graph keeps the whole batch.
    pub(crate) chunks: Vec<(u32, bool)>,
    /// Decode steps after the prompt.
    pub(crate) decode_steps: u32,
    /// Whether every row's output is read.
    pub(crate) keeps_rows: bool,
}

impl Schedule {
    /// A cold prompt in chunks of the given lengths, each in an eager step.
    pub(crate) fn chunks(lengths: &[u32]) -> Self {
        Self {
            prompt_len: lengths.iter().sum(),
            replay_start: 0,
            chunks: lengths.iter().map(|&length| (length, false)).collect(),
            decode_steps: 0,
            keeps_rows: false,
        }
    }

    /// The requests of the steps, one after the other, with their graph.
    pub(crate) fn steps(&self) -> Vec<(GraphMode, Request)> {
        let &Self {
            prompt_len,
            replay_start,
            keeps_rows,
            ..
        } = self;
        let mut steps = Vec::new();
        let mut start = replay_start;
        for &(length, whole) in &self.chunks {
            let chunk = Request::prefill(prompt_len, start..start + length);
            steps.push((
                graph(whole, length),
                Request {
                    replay_start,
                    keeps_rows,
                    ..chunk
                },
            ));
            start += length;
        }
        assert_eq!(start, prompt_len, "chunks that are not the prompt");
        for seq_len in prompt_len + 1..=prompt_len + self.decode_steps {
            let row = Request::decode(prompt_len, seq_len);
            steps.push((
                GraphMode::None,
                Request {
                    replay_start,
                    keeps_rows,
                    ..row
                },
            ));
        }
        steps
    }

    /// Runs the sequence alone.
    pub(crate) fn run(&self, planner: &Planner) -> Sequence {
        let mut sequence = Sequence::default();
        for (mode, request) in self.steps() {
            step(planner, mode, &[request], &mut [&mut sequence]);
        }
        sequence
    }
}

fn graph(whole: bool, rows: u32) -> GraphMode {
    if whole {
        GraphMode::Full {
            padded_rows: RowCount::new(rows),
        }
    } else {
        GraphMode::None
    }
}
