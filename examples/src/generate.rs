//! The program `generate`: prompts in, text out.

use std::io::{self, Write};
use std::num::NonZeroUsize;

use clap::Parser;
use deepseek_model::memory::Demand;
use deepseek_model::tokenizer::{TextStream, Tokenizer};
use deepseek_model::{Error, Event, FinishReason, GenerateOptions, Generation, Generator};
use indicatif::ProgressBar;

use crate::batch::{self, BatchArgs};
use crate::flags;
use crate::graphs::GraphArgs;
use crate::io::Io;
use crate::memory::{MemoryArgs, MemoryTable, Remedies};
use crate::model::{Checkpoint, ModelArgs, PolicyArgs, blame};
use crate::output::{self, Record, heading, logprob_table, spelled};
use crate::picture::{Picture, RowMap};
use crate::progress;
use crate::prompts::{Prompt, PromptArgs};
use crate::sampling::SamplingArgs;
use crate::steps::phase_table;
use crate::summary::Summary;

/// Prompt rows of a step at most, unless `--chunk` says so.
const CHUNK: NonZeroUsize = NonZeroUsize::new(8192).unwrap();

/// The same when every row's logits are wanted: with a vocabulary of 129,280 these take half
/// a megabyte a row.
const LOGPROB_CHUNK: NonZeroUsize = NonZeroUsize::new(512).unwrap();

/// Columns of the picture that `--explain` draws.
const PICTURE_COLUMNS: usize = 64;

/// What would help against a lack of memory.
const REMEDIES: Remedies = Remedies {
    cache: "shorten the prompts, or lower --max-new-tokens",
    no_cache: "raise the limit, or give fewer prompts",
    step: "lower --chunk, or give fewer prompts",
};

/// The same where there is one prompt.
const REMEDIES_OF_ONE: Remedies = Remedies {
    cache: "shorten the prompt, or lower --max-new-tokens",
    no_cache: "raise the limit",
    step: "lower --chunk",
};

const AFTER_HELP: &str = "\
The summary counts the tokens that were chosen, the one that ended a text included. The first of a
text comes with the step that ends its prefill; the pace of decode is that of steps without prefill.

RAYON_NUM_THREADS sets how many threads compute: 0, the default, is one for each core; at most 256,
or four for each core where that is more.";

/// Continues texts with a DeepSeek-V4.1 decoder, replaying only the rows of a prompt that matter in
/// its later layers.
///
/// The text goes to standard output, a summary to standard error.
#[derive(Debug, Parser)]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag")]
#[command(name = "generate", version, after_long_help = format!("{}\n\n{}\n\n{AFTER_HELP}\n\n{}", output::FIELDS, batch::AFTER_HELP, flags::STATUS))]
pub struct GenerateArgs {
    /// Which model runs, and how.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Where prompts come from.
    #[command(flatten)]
    pub prompts: PromptArgs,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Tokens to generate per prompt at most; 0 only computes the prompt.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 128,
        value_parser = flags::text(flags::whole::<usize>),
        allow_hyphen_values = true
    )]
    pub max_new_tokens: usize,
    /// Which rows are dropped.
    #[command(flatten)]
    pub policy: PolicyArgs,
    /// Prompt rows to compute at a time at most, over all prompts, 1 or above [default: 8192, or 512
    /// with --logprobs].
    ///
    /// With --logprobs the logits of every row are held at once. Which rows run depends on how a prompt
    /// is cut under step-tail only. Sums in another order differ in their last bits under every policy,
    /// and rounding of cached values, or a choice between scores that all but tie, can make more of that:
    /// see --no-activation-rounding.
    ///
    /// On the CPU a step that would take more memory than there is is refused before it runs. That is
    /// an estimate: where memory runs out all the same, the system ends the program.
    #[arg(
        long,
        value_name = "N",
        value_parser = flags::text(flags::counting::<NonZeroUsize>),
        allow_hyphen_values = true
    )]
    pub chunk: Option<NonZeroUsize>,
    /// Also give the log-probability of each token of prompt and output under the model itself,
    /// before temperature, top-k and top-p. Every prompt row then runs in every layer.
    #[arg(long)]
    pub logprobs: bool,
    /// Print one JSON object per prompt instead of text; --help lists its fields.
    #[arg(long)]
    pub json: bool,
    /// Measure where the time of the steps goes, and print it on standard error: on a GPU its own time,
    /// by events. What is left of a step, as what the host does between phases, is listed as other.
    #[arg(long)]
    pub profile: bool,
    /// Draw, on standard error, which prompt rows ran in which layers, and say what took which
    /// memory of the device. What graphs took is by how much its free memory fell, for whatever program.
    #[arg(long)]
    pub explain: bool,
    /// What it may take of its device.
    #[command(flatten)]
    pub memory: MemoryArgs,
    /// Many requests from a file.
    #[command(flatten)]
    pub batch: BatchArgs,
    // The last: its heading holds for all flags that follow it.
    /// Which steps run in CUDA graphs.
    #[command(flatten)]
    pub graphs: GraphArgs,
}

/// Runs the program.
///
/// # Errors
/// Bad input is refused before anything is written to `io.out`, by an error that names the flag,
/// the file or the field. A reader that closed `io.out` gives an error too.
pub fn run(args: &GenerateArgs, io: &mut Io<'_>) -> anyhow::Result<()> {
    args.batch.check()?;
    if args.batch.batch.is_some() {
        return batch::run(args, io);
    }
    let checkpoint = args.model.checkpoint()?;
    let prompts = args.prompts.collect(io.stdin)?;
    let ids = prompts
        .iter()
        .map(|prompt| prompt.encode(&checkpoint))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let (options, note) = args.options(&checkpoint)?;

    let held = args.model.options()?;
    let lengths: Vec<usize> = ids.iter().map(Vec::len).collect();
    let demand = Demand::of_generation(&checkpoint.config, (&held).into(), &options, &lengths);
    demand.estimate().map_err(|error| args.blame(error))?;
    let remedies = match lengths[..] {
        [_] => &REMEDIES_OF_ONE,
        _ => &REMEDIES,
    };
    let mut account = args
        .memory
        .open(&args.model, &held.device, &demand, remedies)?;
    let idle = args
        .graphs
        .idle(args.model.device, Some(args.policy.replay));
    for note in note.into_iter().chain(idle) {
        // The run does not depend on whether someone reads it.
        let _ = writeln!(io.err, "{note}");
    }
    let device = held.device.clone();
    let model = args.model.load(held, io.watched)?;
    let config = model.config();
    let (layers, positions, window) = (
        config.layers.len(),
        config.max_positions,
        config.sliding_window,
    );
    let mut generator =
        Generator::new(model, ids.clone(), options).map_err(|error| args.blame(error))?;
    account.loaded(&device)?;
    let bar = progress::capture(io.watched);
    let captured = generator.capture(|done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    // Graphs save time; the text comes without them, too.
    if let Err(error) = captured {
        let _ = writeln!(io.err, "{}", GraphArgs::warning(error));
    }
    let captured = generator.captured();
    let maps = ids
        .iter()
        .map(|ids| RowMap::new(ids.len(), layers))
        .collect();
    Session {
        args,
        tokenizer: &checkpoint.tokenizer,
        prompts: &prompts,
        ids: &ids,
        generator,
        maps,
        positions,
        droppable: lengths.iter().any(|len| *len > window),
        memory: || account.close(&device, captured),
    }
    .run(io)
}

impl GenerateArgs {
    /// Names the flag that a failure to set up is due to.
    fn blame(&self, error: Error) -> anyhow::Error {
        if let Some(flag) = self.graphs.to_blame(&error) {
            return anyhow::Error::from(error).context(flag);
        }
        let size = format!("--max-new-tokens {}", self.max_new_tokens);
        blame(error, &self.policy.flag(), &size)
    }

    /// Prompt rows of a step at most.
    pub(crate) fn step_rows(&self, logprobs: bool) -> NonZeroUsize {
        let usual = if logprobs { LOGPROB_CHUNK } else { CHUNK };
        self.chunk.unwrap_or(usual)
    }

    /// What is asked for, and what to tell of what the checkpoint asks for in vain.
    fn options(
        &self,
        checkpoint: &Checkpoint,
    ) -> anyhow::Result<(GenerateOptions, Option<String>)> {
        let (sampling, note) = self.sampling.resolve(&self.model.model)?;
        let options = GenerateOptions {
            policy: self.policy.replay,
            chunk: self.step_rows(self.logprobs),
            max_new_tokens: self.max_new_tokens,
            stop_ids: checkpoint.config.eos_token_ids.clone(),
            sampling,
            logprobs: self.logprobs,
            runner: self.graphs.options(self.profile),
        };
        Ok((options, note))
    }
}

/// A batch on its way.
struct Session<'a, M> {
    args: &'a GenerateArgs,
    tokenizer: &'a Tokenizer,
    prompts: &'a [Prompt],
    /// Of each prompt.
    ids: &'a [Vec<u32>],
    generator: Generator,
    /// Of each prompt, which rows ran.
    maps: Vec<RowMap>,
    /// Of the model.
    positions: usize,
    /// Whether a prompt is longer than the model's window.
    droppable: bool,
    /// What the run took of its device, once it is over.
    memory: M,
}

impl<M: Fn() -> Option<MemoryTable>> Session<'_, M> {
    fn run(mut self, io: &mut Io<'_>) -> anyhow::Result<()> {
        let tokens = self.ids.iter().map(Vec::len).sum();
        let bar = progress::prefill(io.watched, tokens);
        // A single text is shown as it is made; several would mix.
        let mut stream =
            (self.prompts.len() == 1 && !self.args.json).then(|| TextStream::new(self.tokenizer));
        while !self.generator.is_finished() {
            let events = self.generator.step().map_err(|error| {
                let size = format!("--chunk {}", self.args.step_rows(self.args.logprobs));
                blame(error, &self.args.policy.flag(), &size)
            })?;
            let (stats, prompts) = self.generator.last_step();
            for (request, &prompt) in prompts.iter().enumerate() {
                self.maps[prompt].record(stats, request);
            }
            for event in events {
                self.show(event, &bar, stream.as_mut(), io)?;
            }
        }
        bar.finish_and_clear();
        // The result is out. That nobody can be told what it took is no failure.
        let _ = self.explain(io.err);
        Ok(())
    }

    fn show(
        &self,
        event: Event,
        bar: &ProgressBar,
        stream: Option<&mut TextStream<&Tokenizer>>,
        io: &mut Io<'_>,
    ) -> anyhow::Result<()> {
        match (event, stream) {
            (Event::Prefilled { .. }, _) => {
                let done = self.maps.iter().map(RowMap::prefilled).sum::<usize>();
                bar.set_position(done as u64);
            }
            (Event::Token { id, .. }, Some(stream)) => {
                bar.finish_and_clear();
                io.out.write_all(stream.push(id)?.as_bytes())?;
                io.out.flush()?;
            }
            (Event::Token { .. }, None) => {}
            (Event::Finished { prompt, .. }, stream) => {
                let rest = match stream {
                    Some(stream) => stream.finish()?,
                    None => String::new(),
                };
                bar.suspend(|| self.finish(prompt, &rest, io))?;
            }
        }
        Ok(())
    }

    /// Writes what is still to be shown of a prompt that ended: `rest` of its text if it was
    /// streamed, else all of it.
    fn finish(&self, prompt: usize, rest: &str, io: &mut Io<'_>) -> anyhow::Result<()> {
        if self.args.json {
            let result = self.result(prompt);
            let written = (result, self.tokenizer.decode(&result.ids)?);
            let text = self.prompts[prompt].text.as_str();
            let prompt_of = (text, self.ids[prompt].as_slice());
            let map = &self.maps[prompt];
            let record = Record::new(prompt, prompt_of, written, map, self.args.logprobs);
            serde_json::to_writer(&mut *io.out, &record).map_err(std::io::Error::from)?;
            writeln!(io.out)?;
        } else {
            self.finish_text(prompt, rest, io.out)?;
        }
        io.out.flush()?;
        Ok(())
    }

    fn finish_text(&self, prompt: usize, rest: &str, out: &mut dyn Write) -> anyhow::Result<()> {
        let (result, count) = (self.result(prompt), self.prompts.len());
        // Where no text was asked for, an empty one is not worth a line.
        let has_text = self.args.max_new_tokens > 0;
        if count > 1 && (has_text || self.args.logprobs) {
            writeln!(out, "{}", heading(prompt, count, &self.prompts[prompt]))?;
        }
        match has_text {
            true if count > 1 => writeln!(out, "{}\n", self.tokenizer.decode(&result.ids)?)?,
            true => writeln!(out, "{rest}")?,
            false => {}
        }
        if self.args.logprobs {
            let of_prompt = std::iter::once(None).chain(result.prompt_logprobs.iter().map(Some));
            let of_output = result.logprobs.iter().map(Some);
            let logprobs = of_prompt.chain(of_output).map(Option::<&f32>::copied);
            let tokens = self.ids[prompt].iter().chain(&result.ids);
            let tokens = tokens.map(|&id| spelled(self.tokenizer, id));
            let tokens = tokens.collect::<Result<Vec<_>, _>>()?;
            writeln!(out, "{}", logprob_table(tokens.into_iter().zip(logprobs)))?;
        }
        Ok(())
    }

    fn result(&self, prompt: usize) -> &Generation {
        self.generator
            .results()
            .nth(prompt)
            .expect("one result per prompt")
    }

    /// Tells a person what it took.
    fn explain(&self, err: &mut dyn Write) -> io::Result<()> {
        if self.args.explain {
            let count = self.prompts.len();
            for (index, (prompt, map)) in self.prompts.iter().zip(&self.maps).enumerate() {
                match count {
                    1 => writeln!(err, "{}", prompt.source)?,
                    _ => writeln!(err, "{}", heading(index, count, prompt))?,
                }
                write!(err, "{}", map.picture(PICTURE_COLUMNS))?;
            }
            writeln!(err, "{}\n", Picture::LEGEND)?;
            if let Some(memory) = (self.memory)() {
                writeln!(err, "{memory}")?;
            }
        }
        let chosen = |result: &Generation| {
            result.ids.len() + usize::from(result.finish == Some(FinishReason::Stop))
        };
        let cut_off = |result: &&Generation| result.finish == Some(FinishReason::Positions);
        let summary = Summary {
            cost: self.generator.summary(),
            chosen: self.generator.results().map(chosen).sum(),
            first_tokens: self
                .generator
                .results()
                .filter_map(|r| r.time_to_first_token)
                .collect(),
            maps: &self.maps,
            policy: self.args.policy.replay,
            logprobs: self.args.logprobs,
            cut_off: self.generator.results().filter(cut_off).count(),
            positions: self.positions,
            droppable: self.droppable,
        };
        write!(err, "{summary}")?;
        write!(err, "{}", phase_table(self.generator.summary()))
    }
}
