//! Filling the buffers of a plan.

use alloc::vec::Vec;

use crate::plan::Level;
use crate::tails::Tail;
use crate::{GraphMode, PlanError, ReplayPlan, Request, StepPlan};

impl StepPlan {
    pub(crate) fn clear(&mut self, mode: GraphMode) {
        self.decision = ReplayPlan::WholeBatch;
        self.mode = mode;
        self.seq_lens.clear();
        self.levels.clear();
        self.start_locs.clear();
        self.rows.clear();
        self.kv_starts.clear();
        self.layers.clear();
    }

    /// Level 0, with the checks on the batch; gives its rows.
    pub(crate) fn push_whole_batch(&mut self, requests: &[Request]) -> Result<u32, PlanError> {
        self.grow(|plan| &mut plan.start_locs, requests.len() + 1)?;
        self.grow(|plan| &mut plan.seq_lens, requests.len())?;
        let mut n_rows = 0u32;
        self.start_locs.push(0);
        for (i, request) in requests.iter().enumerate() {
            request.check(i)?;
            n_rows = n_rows
                .checked_add(request.query_len)
                .ok_or(PlanError::TooManyRows { request: i })?;
            self.start_locs.push(n_rows);
            self.seq_lens.push(request.seq_len);
        }
        self.levels.push(Level { rows: None, n_rows });
        Ok(n_rows)
    }

    /// The level of the rows of a tail; that of `outer`, which holds them, when these are all of it.
    pub(crate) fn push_level(
        &mut self,
        outer: usize,
        requests: &[Request],
        tail: Tail,
    ) -> Result<usize, PlanError> {
        self.grow(|plan| &mut plan.start_locs, requests.len() + 1)?;
        let offsets = self.start_locs.len();
        let mut n_rows = 0;
        self.start_locs.push(0);
        self.start_locs.extend(requests.iter().map(|request| {
            n_rows += request.seq_len - tail.first_row(request);
            n_rows
        }));
        if n_rows == self.levels[outer].n_rows {
            self.start_locs.truncate(offsets);
            return Ok(outer);
        }

        let first = self.rows.len();
        self.grow(|plan| &mut plan.rows, n_rows as usize)?;
        // Requests that keep all their rows, as decode steps do, join up with the one before.
        let mut run = 0..0;
        let (batch, set) = self.start_locs.split_at(offsets);
        for (end, kept) in batch[1..].iter().zip(set.windows(2)) {
            let start = end - (kept[1] - kept[0]);
            if start != run.end {
                self.rows.extend(run);
                run = start..start;
            }
            run.end = *end;
        }
        self.rows.extend(run);
        self.levels.push(Level {
            rows: Some(first..self.rows.len()),
            n_rows,
        });
        Ok(self.levels.len() - 1)
    }

    /// One more list of KV bounds.
    pub(crate) fn push_kv_starts(
        &mut self,
        requests: &[Request],
        written: Tail,
    ) -> Result<usize, PlanError> {
        self.grow(|plan| &mut plan.kv_starts, requests.len())?;
        let list = self.kv_starts.len() / requests.len().max(1);
        self.kv_starts
            .extend(requests.iter().map(|request| written.kv_start(request)));
        Ok(list)
    }

    /// Makes room for `more` numbers in one of the lists.
    fn grow(
        &mut self,
        list: impl FnOnce(&mut Self) -> &mut Vec<u32>,
        more: usize,
    ) -> Result<(), PlanError> {
        let lists = [
            &self.seq_lens,
            &self.start_locs,
            &self.rows,
            &self.kv_starts,
        ];
        let held = lists.iter().map(|list| list.len()).sum::<usize>();
        let numbers = held.saturating_add(more);
        if numbers > Self::MAX_NUMBERS {
            return Err(PlanError::TooLarge { numbers });
        }
        let room = list(self).try_reserve(more);
        room.map_err(|_| PlanError::NoMemory { numbers })
    }
}
