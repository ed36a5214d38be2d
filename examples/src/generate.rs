//! The program `generate`: prompts in, text out.

use std::io::{self, Write};
use std::num::NonZeroUsize;

use clap::Parser;
use deepseek_model::tokenizer::{TextStream, Tokenizer};
use deepseek_model::{Event, GenerateOptions, Generation, Generator, ReplayPolicy};
use indicatif::ProgressBar;

use crate::io::Io;
use crate::model::{Checkpoint, ModelArgs, blame};
use crate::output::{Record, Summary, heading, logprob_table};
use crate::picture::{Picture, RowMap};
use crate::progress;
use crate::prompts::{Prompt, PromptArgs};
use crate::sampling::SamplingArgs;

/// Prompt rows of a step at most when every row's logits are wanted: with a vocabulary of 129,280
/// these take half a megabyte a row.
const LOGPROB_CHUNK: NonZeroUsize = NonZeroUsize::new(512).unwrap();

/// Columns of the picture that `--explain` draws.
const PICTURE_COLUMNS: usize = 64;

/// Continues texts with a DeepSeek-V4.1 decoder, replaying only the rows of a prompt that matter in
/// its later layers.
///
/// The text goes to standard output, a summary to standard error.
#[derive(Debug, Parser)]
#[command(name = "generate", version)]
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
        allow_negative_numbers = true
    )]
    pub max_new_tokens: usize,
    /// Which prompt rows the later layers run on: off (all), step-tail (the last of each chunk),
    /// prompt-tail (the last of the prompt) or exact (as many as it takes to change nothing).
    #[arg(long, value_name = "POLICY", default_value_t = ReplayPolicy::PromptTail)]
    pub replay: ReplayPolicy,
    /// Prompt rows to compute at a time at most, 1 or above.
    #[arg(
        long,
        value_name = "N",
        default_value = "8192",
        value_parser = parse_chunk,
        allow_negative_numbers = true
    )]
    pub chunk: NonZeroUsize,
    /// Also give the log-probability of each token of prompt and output. Every prompt row then runs
    /// in every layer.
    #[arg(long)]
    pub logprobs: bool,
    /// Print one JSON object per prompt instead of text.
    #[arg(long)]
    pub json: bool,
    /// Draw, on standard error, which prompt rows ran in which layers.
    #[arg(long)]
    pub explain: bool,
}

fn parse_chunk(text: &str) -> Result<NonZeroUsize, String> {
    let rows: usize = text
        .parse()
        .map_err(|error: std::num::ParseIntError| error.to_string())?;
    NonZeroUsize::new(rows).ok_or_else(|| "expected 1 row or more".to_owned())
}

/// Runs the program.
///
/// # Errors
/// Bad input is refused before anything is written to `io.out`, by an error that names the flag,
/// the file or the field. A reader that closed `io.out` gives an error too.
pub fn run(args: &GenerateArgs, io: &mut Io<'_>) -> anyhow::Result<()> {
    let checkpoint = args.model.checkpoint()?;
    let prompts = args.prompts.collect(io.stdin)?;
    let ids = prompts
        .iter()
        .map(|prompt| prompt.encode(&checkpoint))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let options = args.options(&checkpoint)?;

    let model = args.model.load(io.watched)?;
    let generator = Generator::new(&model, ids.clone(), options).map_err(|e| {
        blame(e, || {
            format!("--replay {} (off runs every model)", args.replay)
        })
    })?;
    let layers = model.config().layers.len();
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
    }
    .run(io)
}

impl GenerateArgs {
    fn options(&self, checkpoint: &Checkpoint) -> anyhow::Result<GenerateOptions> {
        let chunk = if self.logprobs {
            self.chunk.min(LOGPROB_CHUNK)
        } else {
            self.chunk
        };
        Ok(GenerateOptions {
            policy: self.replay,
            chunk,
            max_new_tokens: self.max_new_tokens,
            stop_ids: checkpoint.config.eos_token_ids.clone(),
            sampling: self.sampling.resolve(&self.model.model)?,
            logprobs: self.logprobs,
        })
    }
}

/// A batch on its way.
struct Session<'a> {
    args: &'a GenerateArgs,
    tokenizer: &'a Tokenizer,
    prompts: &'a [Prompt],
    /// Of each prompt.
    ids: &'a [Vec<u32>],
    generator: Generator<'a>,
    /// Of each prompt, which rows ran.
    maps: Vec<RowMap>,
}

impl Session<'_> {
    fn run(mut self, io: &mut Io<'_>) -> anyhow::Result<()> {
        let tokens = self.ids.iter().map(Vec::len).sum();
        let bar = progress::prefill(io.watched, tokens);
        // A single text is shown as it is made; several would mix.
        let mut stream =
            (self.prompts.len() == 1 && !self.args.json).then(|| TextStream::new(self.tokenizer));
        while !self.generator.is_finished() {
            let events = self.generator.step()?;
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
        stream: Option<&mut TextStream<'_>>,
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
                let text = match stream {
                    Some(stream) => stream.finish()? + "\n",
                    None => String::new(),
                };
                bar.suspend(|| self.finish(prompt, &text, io))?;
            }
        }
        Ok(())
    }

    /// Writes what is still to be shown of a prompt that ended: `rest` of its text if it was
    /// streamed, else all of it.
    fn finish(&self, prompt: usize, rest: &str, io: &mut Io<'_>) -> anyhow::Result<()> {
        let result = self.result(prompt);
        let text = &self.prompts[prompt].text;
        if self.args.json {
            let written = (result, self.tokenizer.decode(&result.ids)?);
            let prompt_of = (text.as_str(), self.ids[prompt].as_slice());
            let map = &self.maps[prompt];
            let record = Record::new(prompt, prompt_of, written, map, self.args.logprobs);
            serde_json::to_writer(&mut *io.out, &record).map_err(std::io::Error::from)?;
            writeln!(io.out)?;
        } else if self.prompts.len() == 1 {
            io.out.write_all(rest.as_bytes())?;
        } else {
            writeln!(io.out, "{}", heading(prompt, self.prompts.len(), text))?;
            writeln!(io.out, "{}\n", self.tokenizer.decode(&result.ids)?)?;
        }
        if self.args.logprobs && !self.args.json {
            let of_prompt = std::iter::once(None).chain(result.prompt_logprobs.iter().map(Some));
            let of_output = result.logprobs.iter().map(Some);
            let logprobs = of_prompt.chain(of_output).map(Option::<&f32>::copied);
            let tokens = self.ids[prompt].iter().chain(&result.ids);
            let tokens = tokens.map(|id| self.tokenizer.decode(&[*id]));
            let tokens = tokens.collect::<Result<Vec<_>, _>>()?;
            writeln!(
                io.out,
                "{}",
                logprob_table(tokens.into_iter().zip(logprobs))
            )?;
        }
        io.out.flush()?;
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
            for (prompt, map) in self.prompts.iter().zip(&self.maps) {
                writeln!(err, "{}", prompt.source)?;
                write!(err, "{}", map.picture(PICTURE_COLUMNS))?;
            }
            writeln!(err, "{}\n", Picture::LEGEND)?;
        }
        let summary = Summary {
            cost: self.generator.summary(),
            first_tokens: self
                .generator
                .results()
                .filter_map(|r| r.time_to_first_token)
                .collect(),
            maps: &self.maps,
            policy: self.args.replay,
            logprobs: self.args.logprobs,
        };
        write!(err, "{summary}")
    }
}
