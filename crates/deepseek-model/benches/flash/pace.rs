//! How long measurements will take, and which of them the budget has room for.

use std::time::{Duration, Instant};

use super::{cost::Work, rates::Rates};

/// What a prediction is made from: times of these differ from the ideal by factors of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Prefill,
    /// A step in a graph, or operation by operation.
    Decode {
        graphs: bool,
    },
}

/// How often something is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Runs {
    /// Before the measured ones, unmeasured.
    pub(crate) warm: usize,
    pub(crate) measured: usize,
}

/// The budget, and how many times longer than the ideal each kind takes.
#[derive(Debug)]
pub(crate) struct Pace {
    begun: Instant,
    budget: Duration,
    rates: Option<Rates>,
    /// By kind, the last that was measured.
    slowness: [f64; 3],
}

/// What predictions are too low by at most, one hopes.
const RESERVE: f64 = 1.3;

impl Pace {
    /// A budget that begins now.
    pub(crate) fn new(budget: Duration) -> Self {
        Self {
            begun: Instant::now(),
            budget,
            rates: None,
            // Until something is measured: guesses on the slow side.
            slowness: [10.0, 10.0, 40.0],
        }
    }

    /// What the device can do is known.
    pub(crate) fn rates(&mut self, rates: &Rates) {
        self.rates = Some(*rates);
    }

    fn place(kind: Kind) -> usize {
        match kind {
            Kind::Prefill => 0,
            Kind::Decode { graphs: true } => 1,
            Kind::Decode { graphs: false } => 2,
        }
    }

    /// Seconds that the work takes if the device only multiplies, or only copies.
    fn ideal(&self, work: Work) -> f64 {
        self.rates.map_or(0.0, |rates| {
            let products = work.flops / rates.matmul.median;
            products.max(work.bytes / rates.copy.median)
        })
    }

    /// Seconds that work of a kind will take.
    pub(crate) fn predict(&self, kind: Kind, work: Work) -> f64 {
        self.ideal(work) * self.slowness[Self::place(kind)]
    }

    /// Work of a kind took so many seconds.
    pub(crate) fn learn(&mut self, kind: Kind, work: Work, seconds: f64) {
        let ideal = self.ideal(work);
        if ideal > 0.0 && seconds > 0.0 {
            self.slowness[Self::place(kind)] = seconds / ideal;
        }
    }

    /// Seconds of the budget that are left.
    pub(crate) fn left(&self) -> f64 {
        self.budget
            .saturating_sub(self.begun.elapsed())
            .as_secs_f64()
    }

    /// Seconds since the run began.
    pub(crate) fn spent(&self) -> f64 {
        self.begun.elapsed().as_secs_f64()
    }

    /// How often to measure what takes `once` seconds after `setup` seconds; `None` if there is no
    /// time to measure it once.
    pub(crate) fn runs(&self, once: f64, setup: f64) -> Option<Runs> {
        let wanted = match once {
            ..1.0 => [1, 5],
            ..5.0 => [1, 3],
            // What takes so long is not changed by a cold start.
            _ => [0, 1],
        };
        let choices = [wanted, [0, 1]].map(|[warm, measured]| Runs { warm, measured });
        let takes = |runs: &Runs| setup + once * (runs.warm + runs.measured) as f64;
        choices
            .into_iter()
            .find(|runs| RESERVE * takes(runs) <= self.left())
    }
}
