//! The program `generate`: prompts in, text out.

use std::num::NonZeroUsize;

use clap::Parser;
use deepseek_model::memory::Demand;
use deepseek_model::{Error, GenerateOptions, Generator};

use crate::batch::{self, BatchArgs};
use crate::count;
use crate::flags;
use crate::graphs::GraphArgs;
use crate::io::Io;
use crate::memory::{MemoryArgs, Remedies};
use crate::model::{BEGINNINGS, Checkpoint, ModelArgs, PolicyArgs, blame};
use crate::output;
use crate::picture::RowMap;
use crate::progress;
use crate::prompts::{Prompt, PromptArgs};
use crate::sampling::SamplingArgs;
use crate::session::Session;

/// Prompt rows of a step at most, unless `--chunk` says so.
const CHUNK: NonZeroUsize = NonZeroUsize::new(8192).unwrap();

/// The same when every row's logits are wanted: with a vocabulary of 129,280 these take half
/// a megabyte a row.
const LOGPROB_CHUNK: NonZeroUsize = NonZeroUsize::new(512).unwrap();

const AFTER_HELP: &str = "\
The summary counts the tokens that were chosen, the one that ended a text included. The first of a
text comes with the step that ends its prefill; the pace of decode is that of steps without prefill.

An interrupt from the keyboard ends texts where they are: they are printed so far, and the exit status
is 130; so does SIGTERM, with 143. One during --batch ends it behind the step that runs: what is done
has its result, and the summary says how many are left. A second one ends the program at once. A batch in
which requests fail ends with status 1, behind the results of all; what failed in the run before, and has
its result, is not among them.

RAYON_NUM_THREADS sets how many threads compute: 0, the default, is one for each core; at most 256,
or four for each core where that is more.";

/// Continues texts with a DeepSeek-V4.1 decoder, replaying only the rows of a prompt that matter in
/// its later layers.
///
/// The text goes to standard output, a summary to standard error.
#[derive(Debug, Parser)]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag")]
#[command(name = "generate", version, after_long_help = [output::FIELDS, batch::AFTER_HELP, BEGINNINGS, AFTER_HELP, flags::STATUS].join("\n\n"))]
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
    args.prompts.check()?;
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
    let blame = |error| args.blame(error, &prompts, &lengths);
    demand.estimate().map_err(blame)?;
    let remedies = args.remedies(prompts.len());
    let mut account = args
        .memory
        .open(&args.model, &held.device, &demand, &remedies)?;
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
    let mut generator = Generator::new(model, ids.clone(), options).map_err(blame)?;
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
    /// Names the flag that a failure to set up is due to, for prompts of these lengths in tokens.
    fn blame(&self, error: Error, prompts: &[Prompt], lengths: &[usize]) -> anyhow::Error {
        if let Some(flag) = self.graphs.to_blame(&error) {
            return anyhow::Error::from(error).context(flag);
        }
        blame(error, &self.policy.flag(), &self.size(prompts, lengths))
    }

    /// What a run is as large as it is for.
    fn size(&self, prompts: &[Prompt], lengths: &[usize]) -> String {
        let all = lengths.iter().fold(0, |a: usize, b| a.saturating_add(*b));
        let tokens = count(all, "token");
        let prompts = match prompts {
            [prompt] => format!("{}, {tokens}", prompt.source),
            prompts => format!("{} prompts of {tokens}", prompts.len()),
        };
        match self.max_new_tokens {
            0 => prompts,
            new => format!("{prompts}, and --max-new-tokens {new}"),
        }
    }

    /// What would help so many prompts against a lack of memory.
    fn remedies(&self, prompts: usize) -> Remedies {
        let one = prompts == 1;
        Remedies {
            cache: match (one, self.max_new_tokens) {
                (true, 0) => "shorten the prompt",
                (false, 0) => "shorten the prompts, or give fewer",
                (true, _) => "shorten the prompt, or lower --max-new-tokens",
                (false, _) => "shorten the prompts, or lower --max-new-tokens",
            },
            no_cache: if one {
                "raise the limit"
            } else {
                "raise the limit, or give fewer prompts"
            },
            step: if one {
                "lower --chunk"
            } else {
                "lower --chunk, or give fewer prompts"
            },
        }
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

#[cfg(test)]
mod tests {
    use deepseek_model::CacheError;
    use deepseek_model::memory::Shortage;

    use super::*;
    use crate::prompts::Source;

    /// New tokens were once told to be the reason where there were none.
    #[test]
    fn a_cache_is_as_large_as_its_prompts_and_what_follows_them() {
        let refuse = |new: &str, lengths: &[usize]| {
            let args = GenerateArgs::parse_from(["generate", "--max-new-tokens", new]);
            let prompt = |number| Prompt {
                source: Source::Flag(number),
                text: "a".to_owned(),
            };
            let prompts: Vec<Prompt> = (1..=lengths.len()).map(prompt).collect();
            let error = CacheError::TooLarge {
                bytes: Some(3 << 30),
                shortage: Shortage {
                    available: Some(1 << 30),
                },
                max_sequences: lengths.len(),
                max_tokens: 70_000,
                fits: 30_208,
            };
            let error = args.blame(error.into(), &prompts, lengths).to_string();
            error.split(": a KV cache").next().unwrap().to_owned()
        };
        insta::assert_snapshot!(refuse("0", &[70_000]), @"--prompt number 1, 70,000 tokens");
        insta::assert_snapshot!(refuse("0", &[30_000, 40_000]), @"2 prompts of 70,000 tokens");
        insta::assert_snapshot!(refuse("69999", &[1]), @"--prompt number 1, 1 token, and --max-new-tokens 69999");
        let remedies = |new, prompts| {
            GenerateArgs::parse_from(["generate", "--max-new-tokens", new])
                .remedies(prompts)
                .cache
        };
        for prompts in [1, 2] {
            assert!(!remedies("0", prompts).contains("--max-new-tokens"));
            assert!(remedies("1", prompts).ends_with("or lower --max-new-tokens"));
        }
    }
}
