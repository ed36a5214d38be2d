//! What is measured, in the order of importance.

use std::fmt;

use deepseek_model::ReplayPolicy;
use serde::Serialize;

use super::geometry::{Geometry, short};

/// A prompt, from its first step to the logits of its last row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct PrefillCase {
    pub(crate) length: usize,
    #[serde(serialize_with = "by_name")]
    pub(crate) policy: ReplayPolicy,
    pub(crate) graphs: bool,
}

/// Steps in which each of some sequences decodes a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct DecodeCase {
    pub(crate) batch: usize,
    pub(crate) context: usize,
    pub(crate) graphs: bool,
}

/// Requests that share the beginning of their prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct ServingCase {
    pub(crate) requests: usize,
    /// Tokens of the prompts' common beginning, and of the rest of each.
    pub(crate) shared: usize,
    pub(crate) own: usize,
    /// Tokens of each output.
    pub(crate) new: usize,
}

/// One measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    Prefill(PrefillCase),
    Decode(DecodeCase),
    Serving(ServingCase),
}

#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde hands fields over by reference"
)]
fn by_name<S: serde::Serializer>(policy: &ReplayPolicy, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(policy)
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let graphs = |on| if on { "on" } else { "off" };
        match self {
            Self::Prefill(case) => write!(
                f,
                "prompt of {}, {}, graphs {}",
                short(case.length),
                case.policy,
                graphs(case.graphs)
            ),
            Self::Decode(case) => write!(
                f,
                "decode of {} after {}, graphs {}",
                case.batch,
                short(case.context),
                graphs(case.graphs)
            ),
            Self::Serving(case) => write!(
                f,
                "{} requests of {} + {} tokens",
                case.requests,
                short(case.shared),
                short(case.own)
            ),
        }
    }
}

/// All tasks. A prompt of one chunk says most; then one sequence's decode, then what is longer and
/// shorter, and last what takes longest.
pub(crate) fn in_order(geometry: &Geometry) -> Vec<Task> {
    let mut lengths = geometry.lengths.clone();
    lengths.sort_unstable();
    lengths.dedup();
    let longer = lengths.partition_point(|length| *length <= geometry.chunk);
    let (mut upto, longer) = (lengths[..longer].to_vec(), lengths[longer..].to_vec());
    let main = upto.pop();
    let next = longer.first().copied();
    let mut tasks = Vec::new();
    let prefill = |lengths: &[usize], graphs: &[bool]| {
        let graphs = graphs.iter().filter(|on| geometry.graphs.contains(on));
        let pairs = lengths
            .iter()
            .flat_map(|&length| graphs.clone().map(move |&on| (length, on)));
        let cases = pairs.flat_map(|(length, graphs)| {
            let policies = geometry.policies.iter();
            policies.map(move |&policy| {
                Task::Prefill(PrefillCase {
                    length,
                    policy,
                    graphs,
                })
            })
        });
        cases.collect::<Vec<_>>()
    };
    let decode = decodes(geometry);
    let alone = decode
        .iter()
        .take_while(|case| case.batch == decode[0].batch);
    let alone = alone.count();
    tasks.extend(prefill(main.as_slice(), &[false]));
    tasks.extend(decode[..alone].iter().copied().map(Task::Decode));
    tasks.extend(prefill(main.as_slice(), &[true]));
    tasks.extend(prefill(next.as_slice(), &[false]));
    tasks.extend(prefill(&upto, &[false, true]));
    tasks.extend(decode[alone..].iter().copied().map(Task::Decode));
    tasks.extend(prefill(next.as_slice(), &[true]));
    tasks.extend(geometry.serving.iter().copied().map(Task::Serving));
    tasks.extend(prefill(longer.get(1..).unwrap_or_default(), &[false, true]));
    tasks
}

fn decodes(geometry: &Geometry) -> Vec<DecodeCase> {
    let mut cases = Vec::new();
    for &batch in &geometry.batches {
        for &context in &geometry.contexts {
            let modes = [true, false].into_iter();
            let modes = modes.filter(|on| geometry.graphs.contains(on));
            cases.extend(modes.map(|graphs| DecodeCase {
                batch,
                context,
                graphs,
            }));
        }
    }
    cases
}
