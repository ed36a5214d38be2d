//! `generate --batch`: a file of requests to a file of results, by an engine.

mod file;
mod group;
mod id;
mod line;
mod record;
mod report;
mod request;
mod serve;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail};

use crate::count;
use crate::flags::{self, Blame};
use crate::generate::GenerateArgs;
use crate::graphs::GraphArgs;
use crate::interrupt::{Interrupt, Interrupted, Signal};
use crate::io::{Io, is_dash};
use crate::progress;
use crate::sampling::Recommended;
use file::Results;
use group::Group;
use report::Totals;
use serve::Server;

/// What `--help` says of the lines.
pub(crate) const AFTER_HELP: &str = "\
The fields of a line of --batch, of which prompt or tokens must be there:
  prompt, tokens                     a text, behind the beginning-of-text token as --prompt, which is
                                     enough of a prompt where the text is empty; or token ids, as
                                     they are, 1 or more
  id                                 a string or a number that the result bears as it is spelled, once
                                     in a file; the number of the line without it
  max_new_tokens, temperature,       as the flags of these names, which are for lines that do not say
  top_k, top_p, logprobs
  policy                             as --replay
  seed                               as --seed, which without it is raised by one from line to line
  stop                               a text, or several, that end the output and are no part of it

The fields of a result of --batch:
  line, id                           which request it answers, by its line when it was computed and
                                     by its id; where the file has changed its line may be another
                                     since, its id not
  request                            a digest of what was asked for, and of the model
  text, ids                          the text, and the token ids that were chosen: these go on to the
                                     one that completed a stop text
  finish, stop                       stop (the model said so), stop_text (stop says which), length
                                     or positions
  prompt_tokens, cached_tokens       tokens of the prompt, and how many of them were spared because
                                     another request had begun alike
  time_to_first_token_s              seconds from its first step to the first token; null if there
                                     is none
  prompt_logprobs_nats, logprobs_nats  with logprobs, as above
  error                              why there is no result; then line, id and request alone are
                                     beside it";

/// Many requests from a file.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct BatchArgs {
    /// A file of requests, one JSON object a line; - is standard input. --help lists their fields.
    ///
    /// They run side by side, and each gets the text of a lone run: up to rounding under --replay off
    /// and exact, under prompt-tail with --no-prefix-cache or without a beginning shared. step-tail
    /// depends on what runs beside. --chunk bounds the rows of a step, decode and prefill together.
    /// Requests of several policies run one policy after the other, since a cache has one.
    #[arg(
        long,
        value_name = "FILE",
        allow_hyphen_values = true,
        conflicts_with_all = ["prompt", "prompt_file", "json", "explain", "profile"]
    )]
    pub batch: Option<PathBuf>,
    /// A file for the results of --batch, one JSON object a line; - is standard output [default: -].
    ///
    /// What is on standard output is not known to a later run, which computes it again; the rest is of
    /// files, of which ./- is one.
    ///
    /// What it holds already is not computed again, so that a run that was interrupted, in whatever
    /// way, goes on: only the requests that ran are lost, and half a line is cut off and its request
    /// computed again. A result that is an error counts as one: remove its line to try again. A file
    /// with results of other requests, of another model or of other flags is refused, and so is one
    /// that another run writes to. A checkpoint is told by its config.json.
    ///
    /// What a run that goes on computes is another batch: its texts equal those of an uninterrupted run up
    /// to rounding, as --batch says.
    ///
    /// Each result is written as it comes, in one piece. The disk is waited for at the end alone: when
    /// the power fails, results may be lost and are computed again.
    #[arg(long, value_name = "FILE", allow_hyphen_values = true)]
    pub output: Option<PathBuf>,
    /// The order of the results of --batch: finished (as they come, so that none waits) or input (that of
    /// the lines) [default: finished].
    ///
    /// Under input, results that wait for an earlier one lie in a file beside that of --output, its name
    /// with .pending behind it, until it is their turn: there too they survive. On standard output they
    /// wait in memory.
    #[arg(long, value_enum, value_name = "ORDER", allow_hyphen_values = true)]
    pub order: Option<Order>,
    /// Requests of --batch that run at once at most [default: 32]. The cache has room for that many, the
    /// longest there are.
    #[arg(
        long,
        value_name = "N",
        value_parser = flags::text(flags::counting::<NonZeroUsize>),
        allow_hyphen_values = true
    )]
    pub max_running: Option<NonZeroUsize>,
    /// Compute each prompt of --batch on its own, also where another one has begun alike; --help says how
    /// long a beginning must be to be found.
    #[arg(long)]
    pub no_prefix_cache: bool,
}

/// `--order`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Order {
    /// As they come.
    #[default]
    Finished,
    /// That of the lines.
    Input,
}

impl BatchArgs {
    /// Refuses flags of a batch where there is none. Clap lets them pass beside what a batch excludes.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let given = [
            ("--output", self.output.is_some()),
            ("--order", self.order.is_some()),
            ("--max-running", self.max_running.is_some()),
            ("--no-prefix-cache", self.no_prefix_cache),
        ];
        let names: Vec<_> = given.iter().filter(|(_, given)| *given).collect();
        let names: Vec<&str> = names.iter().map(|(name, _)| *name).collect();
        if self.batch.is_none() && !names.is_empty() {
            let them = if names.len() == 1 { "it" } else { "them" };
            let names = names.join(", ");
            bail!(Blame::misuse(format!(
                "{names}: expected --batch FILE beside {them}, got none"
            )));
        }
        Ok(())
    }
}

/// Of a run that is cut off: what there is no result of.
fn interrupted(by: Signal, results: &Results<'_>, requests: usize) -> Interrupted {
    let without = requests - results.kept();
    let goes_on = if results.is_file() {
        "; the same command goes on from there"
    } else {
        ""
    };
    Interrupted {
        by,
        left: format!(
            "{without} of {} had no result{goes_on}",
            count(requests, "request")
        ),
    }
}

/// Runs a batch.
///
/// # Errors
/// Bad lines, all of them, before anything runs; results that are not this batch's; a place that cannot be
/// written to. Requests that fail get a result that says so, and are counted at the end.
pub(crate) fn run(args: &GenerateArgs, io: &mut Io<'_>) -> anyhow::Result<()> {
    let checkpoint = args.model.checkpoint()?;
    let recommended = Recommended::load(&args.model.model)?;
    let requests = request::read(args, &checkpoint, &recommended, io.stdin)?;
    let held = args.model.options()?;
    let order = args.batch.order.unwrap_or_default();
    let file = args.batch.output.as_ref().filter(|path| !is_dash(path));
    let (mut results, mut notes) = if let Some(path) = file {
        Results::open(path, order, &requests, checkpoint.config.vocab_size)?
    } else {
        let results = Results::stream(io.out, order, requests.len());
        (results, Vec::new())
    };
    let drawn = requests.iter().any(|r| !r.engine.sampling.is_greedy());
    notes.extend(recommended.note(&args.model.model, drawn, &args.sampling.decided()));
    notes.extend(args.graphs.idle(args.model.device, None));
    let groups = Group::all(&requests, |index| results.has(index));
    let plans = groups
        .iter()
        .map(|group| group.plan(args, &requests, &checkpoint, &held));
    let plans = plans.collect::<anyhow::Result<Vec<_>>>()?;
    for note in notes {
        // The run does not depend on whether someone reads it.
        let _ = writeln!(io.err, "{note}");
    }
    let mut totals = Totals::new(requests.len(), results.count(), results.errors());
    let interrupt = io.interrupt.clone();
    let came = || interrupt.as_ref().and_then(Interrupt::came);
    if !plans.is_empty() {
        let model = Arc::new(args.model.load(held, io.watched)?);
        let tokenizer = Arc::new(checkpoint.tokenizer);
        if let Some(interrupt) = &interrupt {
            interrupt.watch().context("cannot watch for interrupts")?;
        }
        for (group, plan) in groups.iter().zip(plans) {
            if came().is_some() {
                break;
            }
            let fewer = plan.fewer;
            let options = plan.options(tokenizer.clone(), !args.batch.no_prefix_cache);
            let server = Server::new(model.clone(), options, &requests);
            let mut server = server.map_err(|error| group.blame(args, error, fewer))?;
            if let Err(error) = server.capture(io.watched) {
                let _ = writeln!(io.err, "{}", GraphArgs::warning(error));
            }
            let bar = progress::requests(io.watched, requests.len());
            let served = server.serve(
                &group.indices,
                &mut results,
                &mut totals,
                &bar,
                interrupt.as_ref(),
            );
            bar.finish_and_clear();
            served?;
        }
    }
    if let Some(by) = came().filter(|_| totals.done() < requests.len()) {
        let _ = write!(io.err, "{totals}");
        bail!(interrupted(by, &results, requests.len()));
    }
    results.finish()?;
    let _ = write!(io.err, "{totals}");
    match totals.failed {
        0 => Ok(()),
        failed => bail!(
            "{failed} of {} requests failed: their results say why",
            requests.len()
        ),
    }
}
