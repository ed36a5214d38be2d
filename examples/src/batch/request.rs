//! Lines of a batch to requests, checked before anything runs.

use std::collections::HashMap;
use std::hash::Hasher;
use std::io::Read;

use anyhow::{Context, bail, ensure};
use deepseek_model::ReplayPolicy;
use deepseek_model::engine::EngineRequest;
use deepseek_model::memory::{MemoryError, check_text};
use deepseek_model::tokenizer::check_ids;
use serde_json::{Value, json};

use super::id::Id;
use super::line::Line;
use crate::generate::GenerateArgs;
use crate::io::{read_text_or, shown};
use crate::model::Checkpoint;
use crate::prompts::encode;
use crate::sampling::{Recommended, SamplingArgs};

/// Faults that are printed; a file of another kind has as many as lines.
const MAX_PRINTED: usize = 20;

/// A line of a batch.
#[derive(Debug)]
pub(super) struct Request {
    /// Its number, from 1.
    pub(super) line: usize,
    /// A string or a number, once in a batch.
    pub(super) id: Id,
    pub(super) policy: ReplayPolicy,
    pub(super) engine: EngineRequest,
    /// Of all that its result depends on, up to rounding: two requests of one digest have one result.
    pub(super) digest: String,
}

/// What holds where a line says nothing.
struct Defaults<'a> {
    args: &'a GenerateArgs,
    checkpoint: &'a Checkpoint,
    recommended: &'a Recommended,
    /// A digest of the model, and of how it computes.
    model: Value,
}

/// Bytes of lines, and of the requests that they become, after which it is asked whether there is memory for as
/// many more.
const CHECKED: usize = 64 << 10;

/// Reads the requests of `--batch`. Lines that are blank count, and ask for nothing.
///
/// # Errors
/// All lines that no request can be made of, or the file if there is none.
pub(super) fn read(
    args: &GenerateArgs,
    checkpoint: &Checkpoint,
    recommended: &Recommended,
    stdin: &mut dyn Read,
) -> anyhow::Result<Vec<Request>> {
    let path = args.batch.batch.as_deref().expect("a batch runs");
    let name = format!("--batch {}", shown(path));
    let text = read_text_or(path, stdin).with_context(|| name.clone())?;
    let config = std::fs::read(args.model.model.join("config.json"))?;
    let (config, dtype) = (digest(&config), args.model.dtype().as_str());
    let rounding = !args.model.no_activation_rounding;
    let defaults = Defaults {
        args,
        checkpoint,
        recommended,
        model: json!([config, dtype, rounding]),
    };
    let (mut requests, mut faults) = (Vec::new(), Vec::new());
    let mut lines_of_ids = HashMap::new();
    // Some programs begin a text in UTF-8 with a byte-order mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let lines = (1..).zip(text.lines());
    let mut unchecked = 0;
    for (line, text) in lines.filter(|(_, text)| !text.trim().is_empty()) {
        // A long line may take as much on its way to tokens, and many short ones as requests.
        unchecked += text.len() + size_of::<Request>();
        if unchecked >= CHECKED {
            unchecked = 0;
            if let Err(MemoryError::Text { shortage, .. }) = check_text(text.len().max(CHECKED)) {
                bail!("{name} line {line}: memory does not hold more requests: {shortage}");
            }
        }
        // Both grow in large pieces.
        let room = requests.try_reserve(1).and(lines_of_ids.try_reserve(1));
        room.with_context(|| format!("{name} line {line}: memory does not hold more requests"))?;
        let request = defaults.request(line, text).and_then(|request| {
            match lines_of_ids.insert(request.id.clone(), line) {
                Some(before) => bail!("id {} is that of line {before}, too", request.id),
                None => Ok(request),
            }
        });
        match request {
            Ok(request) => requests.push(request),
            Err(fault) => faults.push(format!("{name} line {line}: {fault:#}")),
        }
    }
    let count = requests.len() + faults.len();
    ensure!(
        count > 0,
        "{name}: expected a request in each line, there is none"
    );
    match &faults[..] {
        [] => Ok(requests),
        [fault] => bail!("{fault}"),
        faults => {
            let more = match faults.len().saturating_sub(MAX_PRINTED) {
                0 => String::new(),
                more => format!("\n  and {more} more"),
            };
            let printed = &faults[..faults.len().min(MAX_PRINTED)];
            let (bad, printed) = (faults.len(), printed.join("\n  "));
            bail!("{bad} of {count} requests cannot run:\n  {printed}{more}")
        }
    }
}

impl Defaults<'_> {
    fn request(&self, line: usize, text: &str) -> anyhow::Result<Request> {
        let asked = Line::parse(text)?;
        let prompt = self.prompt(&asked)?;
        let policy = match &asked.policy {
            Some(policy) => policy.parse().context("policy")?,
            None => self.args.policy.replay,
        };
        let sampling = self.sampling(line, &asked).config(self.recommended);
        sampling.validate()?;
        let logprobs = asked.logprobs.unwrap_or(self.args.logprobs);
        let mut engine = EngineRequest {
            sampling,
            stop_ids: self.checkpoint.config.eos_token_ids.clone(),
            stop_texts: asked.stop.unwrap_or_default(),
            logprobs: logprobs.then_some(0),
            prompt_logprobs: logprobs.then_some(0),
            ..EngineRequest::greedy(prompt, 0)
        };
        engine.max_new_tokens = asked.max_new_tokens.unwrap_or(self.args.max_new_tokens);
        let digest = self.digest(&engine, policy);
        Ok(Request {
            line,
            id: asked.id.unwrap_or_else(|| Id::of_line(line)),
            policy,
            engine,
            digest,
        })
    }

    fn prompt(&self, asked: &Line) -> anyhow::Result<Vec<u32>> {
        let config = &self.checkpoint.config;
        match (&asked.prompt, &asked.tokens) {
            (Some(text), None) => {
                let ids = encode(text, self.checkpoint).context("prompt")?;
                // An empty text is one token where there is one that texts begin with.
                ensure!(
                    !ids.is_empty(),
                    "prompt: expected 1 token or more, got none"
                );
                Ok(ids)
            }
            (None, Some(ids)) => {
                check_ids(ids, config.vocab_size).context("tokens")?;
                let (count, most) = (ids.len(), config.max_positions);
                ensure!(
                    (1..=most).contains(&count),
                    "tokens: expected 1 to {most} (max_position_embeddings), got {count}"
                );
                Ok(ids.clone())
            }
            (Some(_), Some(_)) => bail!("expected prompt or tokens, got both"),
            (None, None) => bail!("expected prompt or tokens, got neither"),
        }
    }

    fn sampling(&self, line: usize, asked: &Line) -> SamplingArgs {
        let flags = &self.args.sampling;
        let draws = asked.temperature.is_some() || asked.top_k.is_some() || asked.top_p.is_some();
        SamplingArgs {
            greedy: flags.greedy && !draws,
            temperature: asked.temperature.or(flags.temperature),
            top_k: asked.top_k.or(flags.top_k),
            top_p: asked.top_p.or(flags.top_p),
            // Lines that are alike draw other texts.
            seed: asked
                .seed
                .unwrap_or(flags.seed.wrapping_add(line as u64 - 1)),
        }
    }

    fn digest(&self, engine: &EngineRequest, policy: ReplayPolicy) -> String {
        let s = engine.sampling;
        // A greedy choice has no seed.
        let sampling = if s.is_greedy() {
            json!("greedy")
        } else {
            json!([s.temperature, s.top_k, s.top_p, s.seed])
        };
        let request = json!([
            self.model,
            policy.to_string(),
            sampling,
            engine.prompt,
            engine.max_new_tokens,
            engine.stop_texts,
            engine.logprobs.is_some(),
        ]);
        digest(request.to_string().as_bytes())
    }
}

/// 64 bits by a function that stays what it is: digests lie in files.
fn digest(bytes: &[u8]) -> String {
    let mut hasher = fnv::FnvHasher::default();
    hasher.write(bytes);
    format!("{:016x}", hasher.finish())
}
