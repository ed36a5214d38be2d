//! What the server has done, as Prometheus reads it.

use std::borrow::Cow;
use std::time::Instant;

use deepseek_model::engine::{EndReason, EngineStats, Update};
use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

/// What every name begins with.
const PREFIX: &str = "replay";

/// Of the answer to a scrape.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Labels<const N: usize> = [(&'static str, Cow<'static, str>); N];

/// Counters and times, kept by the server; what the engine keeps itself is read at a scrape.
#[derive(Debug)]
pub(super) struct Metrics {
    registry: Registry,
    responses: Family<Labels<2>, Counter>,
    texts: Family<Labels<1>, Counter>,
    first_token: Histogram,
    next_token: Histogram,
    /// Connections that are open.
    pub(super) connections: Gauge,
    pub(super) turned_away: TurnedAway,
}

/// Connections beyond those that there may be.
#[derive(Debug, Clone)]
pub(super) struct TurnedAway(Family<Labels<1>, Counter>);

impl TurnedAway {
    fn new() -> Self {
        let new = Self(Family::default());
        // Who watches how they grow sees the first, too.
        for spare in [true, false] {
            new.0.get_or_create(&Self::label(spare)).inc_by(0);
        }
        new
    }

    /// Counts one, by whether it got a spare place; else it was closed.
    pub(super) fn count(&self, spare: bool) {
        self.0.get_or_create(&Self::label(spare)).inc();
    }

    fn label(spare: bool) -> Labels<1> {
        let place = if spare { "spare" } else { "none" };
        [("place", place.into())]
    }
}

impl Metrics {
    pub(super) fn new() -> Self {
        // From a fraction of a millisecond, of small models on a GPU, to minutes.
        let first_token = Histogram::new(exponential_buckets(0.002, 2.0, 17));
        let next_token = Histogram::new(exponential_buckets(0.0005, 2.0, 14));
        let (responses, texts, connections) =
            (Family::default(), Family::default(), Gauge::default());
        let mut registry = Registry::with_prefix(PREFIX);
        registry.register(
            "time_to_first_token_seconds",
            "From a request's arrival in the queue to its first token",
            first_token.clone(),
        );
        registry.register(
            "inter_token_seconds",
            "From one token of a text to the next",
            next_token.clone(),
        );
        registry.register(
            "responses",
            "HTTP responses, by path and status",
            responses.clone(),
        );
        registry.register("texts", "Texts that ended, by reason", texts.clone());
        registry.register(
            "connections",
            "Connections that are open",
            connections.clone(),
        );
        let turned_away = TurnedAway::new();
        registry.register(
            "connections_turned_away",
            "Connections beyond --max-connections: with a spare place, for one answer, or with none",
            turned_away.0.clone(),
        );
        Self {
            registry,
            responses,
            texts,
            first_token,
            next_token,
            connections,
            turned_away,
        }
    }

    /// Counts a response; `path` is one of few.
    pub(super) fn responded(&self, path: &'static str, status: u16) {
        let labels = [("path", path.into()), ("status", status.to_string().into())];
        self.responses.get_or_create(&labels).inc();
    }

    /// What measures a text from now on.
    pub(super) fn text(&self) -> Stopwatch {
        Stopwatch {
            first_token: self.first_token.clone(),
            next_token: self.next_token.clone(),
            texts: self.texts.clone(),
            last: Instant::now(),
            has_token: false,
        }
    }

    /// All of it, with what the engine says.
    ///
    /// # Errors
    /// A value cannot be written, as only one that is not the server's own could be.
    pub(super) fn render(&self, engine: &EngineStats) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        text::encode_registry(&mut text, &self.registry)?;
        text::encode_registry(&mut text, &of_engine(engine))?;
        text::encode_eof(&mut text)?;
        Ok(text)
    }
}

/// What the engine keeps itself.
fn of_engine(stats: &EngineStats) -> Registry {
    let mut registry = Registry::with_prefix(PREFIX);
    let used = stats.pages - stats.free_pages;
    let gauges = [
        (
            "requests_waiting",
            "Requests that wait for a place",
            stats.waiting,
        ),
        ("requests_running", "Requests that run", stats.running),
        ("kv_pages", "Pages of the KV cache", stats.pages),
        (
            "kv_pages_used",
            "Pages of the KV cache that a running request holds",
            used,
        ),
    ];
    for (name, help, value) in gauges {
        registry.register(name, help, ConstGauge::new(value as i64));
    }
    let trimmed = stats.row_layers_without_replay - stats.row_layers;
    let counters = [
        ("steps", "Steps of the model", stats.steps),
        (
            "prompt_tokens",
            "Tokens of prompts that began to run",
            stats.prompt_tokens,
        ),
        (
            "cached_tokens",
            "Of these, tokens that were found in the cache",
            stats.cached_tokens,
        ),
        (
            "generated_tokens",
            "Tokens that were chosen",
            stats.generated_tokens,
        ),
        (
            "preemptions",
            "Requests that lost their room and were computed again",
            stats.preemptions,
        ),
        (
            "row_layers_run",
            "Rows through layers that ran",
            stats.row_layers,
        ),
        (
            "row_layers_trimmed",
            "Rows through layers that replay spared",
            trimmed,
        ),
    ];
    for (name, help, value) in counters {
        registry.register(name, help, ConstCounter::new(value));
    }
    registry
}

/// Sees the updates of one text as they come.
pub(super) struct Stopwatch {
    first_token: Histogram,
    next_token: Histogram,
    texts: Family<Labels<1>, Counter>,
    /// When the last token came, or the request.
    last: Instant,
    has_token: bool,
}

impl Stopwatch {
    pub(super) fn see(&mut self, update: &Update) {
        let end = match update {
            Update::Token { .. } => {
                let now = Instant::now();
                let histogram = if self.has_token {
                    &self.next_token
                } else {
                    &self.first_token
                };
                histogram.observe((now - self.last).as_secs_f64());
                (self.last, self.has_token) = (now, true);
                return;
            }
            Update::Finished { reason, .. } => match reason {
                EndReason::Stop => "stop",
                EndReason::StopText { .. } => "stop_text",
                EndReason::Length => "length",
                EndReason::Positions => "positions",
                EndReason::Cancelled => "cancelled",
                EndReason::Deadline => "deadline",
            },
            Update::Failed(_) => "failed",
            Update::Started { .. } | Update::Prompt { .. } => return,
        };
        self.texts.get_or_create(&[("reason", end.into())]).inc();
    }
}
