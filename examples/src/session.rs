//! Prompts on their way: steps to events, events to streams.

use std::io::{self, Write};

use anyhow::Context;
use deepseek_model::tokenizer::{TextStream, Tokenizer};
use deepseek_model::{Event, FinishReason, Generation, Generator};
use indicatif::ProgressBar;

use crate::count;
use crate::generate::GenerateArgs;
use crate::interrupt::{Interrupt, Interrupted, Signal};
use crate::io::Io;
use crate::memory::MemoryTable;
use crate::model::blame;
use crate::output::{Record, heading, logprob_table, spelled};
use crate::picture::{Picture, RowMap};
use crate::progress;
use crate::prompts::Prompt;
use crate::steps::phase_table;
use crate::summary::Summary;

/// Columns of the picture that `--explain` draws.
const PICTURE_COLUMNS: usize = 64;

/// A batch on its way.
pub(crate) struct Session<'a, M> {
    pub(crate) args: &'a GenerateArgs,
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) prompts: &'a [Prompt],
    /// Of each prompt.
    pub(crate) ids: &'a [Vec<u32>],
    pub(crate) generator: Generator,
    /// Of each prompt, which rows ran.
    pub(crate) maps: Vec<RowMap>,
    /// Of the model.
    pub(crate) positions: usize,
    /// Whether a prompt is longer than the model's window.
    pub(crate) droppable: bool,
    /// What the run took of its device, once it is over.
    pub(crate) memory: M,
}

impl<M: Fn() -> Option<MemoryTable>> Session<'_, M> {
    /// Runs it to its end, or to an interrupt.
    ///
    /// # Errors
    /// A step fails, a stream cannot be written to, or the run was interrupted: then what there is of the
    /// texts is written.
    pub(crate) fn run(mut self, io: &mut Io<'_>) -> anyhow::Result<()> {
        let tokens = self.ids.iter().map(Vec::len).sum();
        let bar = progress::prefill(io.watched, tokens);
        // A single text is shown as it is made; several would mix.
        let mut stream =
            (self.prompts.len() == 1 && !self.args.json).then(|| TextStream::new(self.tokenizer));
        if let Some(interrupt) = &io.interrupt {
            interrupt.watch().context("cannot watch for interrupts")?;
        }
        while !self.generator.is_finished() {
            if let Some(signal) = io.interrupt.as_ref().and_then(Interrupt::came) {
                bar.finish_and_clear();
                return self.cut_off(signal, stream, io);
            }
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

    /// Writes what there is of the texts that have not ended.
    ///
    /// # Errors
    /// It cannot be written, or was: the run was interrupted.
    fn cut_off(
        &self,
        by: Signal,
        stream: Option<TextStream<&Tokenizer>>,
        io: &mut Io<'_>,
    ) -> anyhow::Result<()> {
        let rest = stream.map(|mut stream| stream.finish());
        let rest = rest.transpose()?.unwrap_or_default();
        let unfinished = |index: &usize| self.result(*index).finish.is_none();
        let cut: Vec<usize> = (0..self.prompts.len()).filter(unfinished).collect();
        for &prompt in &cut {
            self.finish(prompt, &rest, io)?;
        }
        let _ = self.explain(io.err);
        let all = count(self.prompts.len(), "text");
        let left = format!("{} of {all} had not come to an end", cut.len());
        Err(Interrupted { by, left }.into())
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
