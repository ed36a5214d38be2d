//! Which requests run in the next step, and on how many of their tokens.

use super::{EngineCore, core::Running, request::Update};
use crate::{PrefixOptions, Result, SequenceOptions};

/// A request's part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    /// Where in the list of those that run.
    pub(super) index: usize,
    /// Tokens of the sequence before the step.
    pub(super) start: usize,
    /// Tokens of the step.
    pub(super) tokens: usize,
    /// Pages that it takes.
    pages: usize,
}

/// A step that is being put together.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) parts: Vec<Part>,
    /// Rows that may still be added.
    budget: usize,
    /// Pages that the parts take.
    taken: usize,
}

impl EngineCore {
    /// Puts the next step together. Requests may lose their places on the way, and others begin to
    /// run.
    pub(super) fn plan(&mut self, updates: &mut Vec<(super::RequestId, Update)>) -> Result<Plan> {
        let mut plan = Plan {
            budget: self.options.max_step_tokens.get(),
            ..Plan::default()
        };
        for decode in [true, false] {
            let mut index = 0;
            while index < self.running.len() {
                self.plan_one(&mut plan, index, decode)?;
                index += 1;
            }
        }
        self.admit(&mut plan, updates)?;
        plan.parts.sort_by_key(|part| part.index);
        Ok(plan)
    }

    /// Adds the next tokens of a request that runs, if they are of the kind that is wanted.
    fn plan_one(&mut self, plan: &mut Plan, index: usize, decode: bool) -> Result<()> {
        let Running { job, sequence } = &self.running[index];
        let start = self.runner.cache().len(*sequence)?;
        let planned = plan.parts.iter().any(|part| part.index == index);
        if planned || job.decodes(start) != decode {
            return Ok(());
        }
        let tokens = job.next(start).min(plan.budget);
        if tokens == 0 {
            return Ok(());
        }
        // The youngest give way, of this age or younger none.
        while self.missing(index, start + tokens)? > self.free(plan) {
            let youngest = self.running.len() - 1;
            if youngest == index {
                break;
            }
            self.preempt(plan, youngest)?;
        }
        let tokens = tokens.min(self.room(plan, index, start)?);
        if tokens > 0 {
            let pages = self.missing(index, start + tokens)?;
            plan.add(Part {
                index,
                start,
                tokens,
                pages,
            });
        } else if decode {
            // It waits for those before it, and its room may be what they need next.
            self.preempt(plan, index)?;
        }
        Ok(())
    }

    /// Lets requests that wait run, the oldest first, as long as there is a place for the next one and
    /// room for all that is known of its text and one token more.
    fn admit(
        &mut self,
        plan: &mut Plan,
        updates: &mut Vec<(super::RequestId, Update)>,
    ) -> Result<()> {
        while plan.budget > 0 && self.running.len() < self.options.cache.max_sequences {
            let index = self.running.len();
            let reserved = self.reserved(plan)?;
            let Some(id) = self.waiting.front().map(|job| job.id) else {
                break;
            };
            // To look again costs as much as the prompt is long.
            let room = (id, self.free(plan), index);
            let refused = |&(first, free, running): &(_, usize, usize)| {
                first == id && free >= room.1 && running == index
            };
            if self.refused.as_ref().is_some_and(refused) {
                break;
            }
            let job = self.waiting.pop_front().expect("there is a first");
            let (sequence, cached) = match self.add(&job) {
                Ok(added) => added,
                Err(error) => {
                    self.waiting.push_front(job);
                    return Err(error);
                }
            };
            self.running.push(Running { job, sequence });
            if self.finds_more_after(plan, index, cached.start) {
                self.withdraw(index)?;
                break;
            }
            let known = self.running[index].job.tokens.len();
            let needed = self.missing(index, known + 1)?;
            if index > 0 && needed + reserved > self.free(plan) {
                self.refused = Some(room);
                self.withdraw(index)?;
                break;
            }
            self.refused = None;
            let job = &mut self.running[index].job;
            if job.cached.is_none() {
                job.cached = Some(cached);
                self.stats.prompt_tokens += job.prompt_len() as u64;
                self.stats.cached_tokens += cached.start as u64;
                updates.push((job.id, Update::Started { cached }));
            }
            let decode = job.decodes(cached.start);
            self.plan_one(plan, index, decode)?;
        }
        Ok(())
    }

    /// Whether the request at `index`, which would begin at `start`, finds more in the cache if it waits
    /// for this step: another one computes in it what both begin with. It does not wait for ever, as
    /// what it waits for is done by the step.
    fn finds_more_after(&self, plan: &Plan, index: usize, start: usize) -> bool {
        let (job, cache) = (&self.running[index].job, self.runner.cache());
        let prompt = &job.request.prompt;
        if !self.options.prefix_cache || job.request.prompt_logprobs.is_some() {
            return false;
        }
        plan.parts.iter().any(|part| {
            let Running {
                job: other,
                sequence,
            } = &self.running[part.index];
            let end = part.start + part.tokens;
            // All of a prompt that was computed before this step was looked for.
            let prefills = part.start < other.prompt_len() && start < end;
            let salts = [other, job].map(|job| job.request.salt);
            if !prefills || salts[0] != salts[1] || !cache.publishes(*sequence) {
                return false;
            }
            let page = cache.page_tokens();
            let done = other.request.prompt[..end].chunks_exact(page);
            let known = prompt.chunks_exact(page).zip(done);
            let known = known.take_while(|(own, other)| own == other).count() * page;
            cache.spared(known.min(self.finds_at_most(job)), prompt.len()) > start
        })
    }

    /// Tokens that a request may find in the cache.
    fn finds_at_most(&self, job: &super::job::Job) -> usize {
        match job.cached {
            Some(before) if !self.runner.cache().rebuilds_exactly() => before.tokens,
            _ => usize::MAX,
        }
    }

    /// Adds a request's sequence to the cache.
    fn add(&mut self, job: &super::job::Job) -> Result<(crate::SequenceId, crate::CachedPrefix)> {
        let keeps_rows = job.request.prompt_logprobs.is_some();
        if !self.options.prefix_cache {
            let options = SequenceOptions {
                prompt_len: job.prompt_len(),
                keeps_rows,
            };
            return Ok((self.runner.add(options)?, crate::CachedPrefix::default()));
        }
        let prefix = PrefixOptions {
            salt: job.request.salt,
            at_most: self.finds_at_most(job),
        };
        self.runner
            .add_prompt(&job.request.prompt, keeps_rows, prefix)
    }

    /// Puts the youngest request back to the front of the queue: it is computed again from the tokens
    /// that it has.
    fn preempt(&mut self, plan: &mut Plan, index: usize) -> Result<()> {
        plan.remove(index);
        self.stats.preemptions += 1;
        self.withdraw(index)
    }

    fn withdraw(&mut self, index: usize) -> Result<()> {
        let Running { job, sequence } = self.running.remove(index);
        self.runner.remove(sequence)?;
        self.waiting.push_front(job);
        Ok(())
    }

    /// Pages that a sequence needs beyond its own to have `tokens` tokens.
    fn missing(&self, index: usize, tokens: usize) -> Result<usize> {
        let sequence = self.running[index].sequence;
        self.runner.cache().missing_pages(sequence, tokens)
    }

    /// Tokens that a sequence can still be given, by the pages that are free.
    fn room(&self, plan: &Plan, index: usize, start: usize) -> Result<usize> {
        let cache = self.runner.cache();
        let held = cache.held_pages(self.running[index].sequence)?;
        Ok((held + self.free(plan)) * cache.page_tokens() - start)
    }

    /// Pages that neither sequences hold nor the parts of the step take.
    fn free(&self, plan: &Plan) -> usize {
        self.runner.cache().free_pages().saturating_sub(plan.taken)
    }

    /// Pages that requests which run will need for the tokens that are known of them, beyond those that
    /// the step takes.
    fn reserved(&self, plan: &Plan) -> Result<usize> {
        let mut pages = 0;
        for (index, running) in self.running.iter().enumerate() {
            pages += self.missing(index, running.job.tokens.len())?;
        }
        Ok(pages.saturating_sub(plan.taken))
    }
}

impl Plan {
    fn add(&mut self, part: Part) {
        self.budget -= part.tokens;
        self.taken += part.pages;
        self.parts.push(part);
    }

    /// Takes a request's part out again.
    fn remove(&mut self, index: usize) {
        if let Some(at) = self.parts.iter().position(|part| part.index == index) {
            let part = self.parts.remove(at);
            self.budget += part.tokens;
            self.taken -= part.pages;
        }
    }
}
