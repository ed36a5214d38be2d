//! Sequences of a runner, step by step.

use deepseek_model::{LogitRows, Runner, SequenceId, SequenceOptions, StepMode, StepRequest};

use crate::common::{flat, greedy};

/// Adds a prompt and prefills it in one step: the sequence with its first greedy id, and how it ran.
pub(crate) fn start(runner: &mut Runner, prompt: &[u32]) -> ((SequenceId, u32), StepMode) {
    let options = SequenceOptions {
        prompt_len: prompt.len(),
        keeps_rows: false,
    };
    let sequence = runner.add(options).unwrap();
    let request = StepRequest {
        sequence,
        tokens: prompt,
        logits: LogitRows::Last,
    };
    let (output, mode) = runner.forward(&[request]).unwrap();
    ((sequence, greedy(&flat(&output.logits))), mode)
}

/// One greedy decode step of all; their logits, and how it ran.
pub(crate) fn decode(runner: &mut Runner, batch: &mut [(SequenceId, u32)]) -> (Vec<f32>, StepMode) {
    let tokens: Vec<[u32; 1]> = batch.iter().map(|(_, id)| [*id]).collect();
    let requests = batch.iter().zip(&tokens);
    let requests: Vec<_> = requests
        .map(|((sequence, _), tokens)| StepRequest {
            sequence: *sequence,
            tokens,
            logits: LogitRows::Last,
        })
        .collect();
    let (output, mode) = runner.forward(&requests).unwrap();
    let logits = flat(&output.logits);
    let width = logits.len() / batch.len();
    for ((_, id), row) in batch.iter_mut().zip(logits.chunks(width)) {
        *id = greedy(row);
    }
    (logits, mode)
}
