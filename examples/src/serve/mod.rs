//! The program `serve`: a model behind HTTP, by the interface of OpenAI.
//!
//! The engine runs on a thread of its own. A request is read and checked by a task, its texts are
//! ordered from the engine, and their updates come back through a queue whose length is bounded:
//!
//! ```text
//!  connections ─► routes ─► completions, chat ─► app ─► engine
//!                                                          │ updates
//!  client ◄─ respond ◄─ form ◄─ reply ◄─ answers ◄─────────┘
//! ```

mod answers;
mod app;
mod args;
mod body;
mod chat;
mod completions;
mod connections;
mod dialect;
mod error;
mod fields;
mod form;
mod jinja;
mod linger;
mod methods;
mod metrics;
mod params;
mod peer;
mod python;
mod renderer;
mod renders;
mod reply;
mod respond;
mod routes;
mod shutdown;
mod template;
mod tojson;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use deepseek_model::Model;
use deepseek_model::engine::{Engine, EngineOptions};
use tokio::net::TcpSocket;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use app::App;
pub use args::ServeArgs;
use connections::Connections;
use error::ApiError;
use metrics::Metrics;
pub use renderer::{is_renderer, render};
use renders::Renders;
use shutdown::{Gate, Passed, Signals, within};
use template::Template;

use crate::count;
use crate::graphs::GraphArgs;
use crate::io::{Io, shown};
use crate::memory::Remedies;
use crate::model::Checkpoint;
use crate::sampling::Recommended;
use crate::{progress, threads};

/// Threads for connections; the model has its own.
const THREADS: usize = 2;

/// Threads for long texts, which become tokens there.
const BLOCKING_THREADS: usize = 2;

/// Threads of the engine.
const ENGINE_THREADS: usize = 1;

/// What connections get to hand out their last bytes, if as much is left of `--grace`.
const LAST_BYTES: Duration = Duration::from_secs(5);

/// What would help against a lack of memory.
const REMEDIES: Remedies = Remedies {
    cache: "lower --cache-tokens or --max-running",
    no_cache: "lower --cache-tokens or --max-running",
    step: "lower --chunk",
};

/// Runs the program, to its signal.
///
/// # Errors
/// Bad flags and files are refused, by an error that names them, before the weights are read. Requests may
/// have been cut off at the end.
pub fn run(args: &ServeArgs, io: &mut Io<'_>) -> anyhow::Result<()> {
    let Checkpoint { config, tokenizer } = args.model.checkpoint()?;
    let tokenizer = Arc::new(tokenizer);
    let dir = &args.model.model;
    let recommended = Recommended::load(dir)?;
    let renders = template(args);
    let address = args.address()?;
    let socket = connections::bind(address).with_context(|| args.listening(address))?;

    let held = args.model.options()?;
    let options = args.engine(&config, tokenizer.clone());
    let demand = args.demand(&config, &held, &options);
    let place = demand.place;
    let estimate = demand.estimate();
    estimate.map_err(|error| args.blame(error, &config, place))?;
    args.memory
        .open(&args.model, &held.device, &demand, &REMEDIES)?;
    let notes = [
        args.exposed(address),
        recommended.note(dir, true, &[]),
        args.graphs
            .idle(args.model.device, Some(args.policy.replay)),
        renders
            .as_ref()
            .err()
            .map(|error| format!("note: no chat: {error:#}")),
    ];
    for note in notes.into_iter().flatten() {
        // The run does not depend on whether someone reads it.
        let _ = writeln!(io.err, "{note}");
    }
    threads::check_more(THREADS + BLOCKING_THREADS + ENGINE_THREADS)?;
    let model = args.model.load(held, io.watched)?;
    let (gate, passed) = Gate::new();
    let app = Arc::new(App {
        engine: start(model, options, io).map_err(|error| args.blame(error, &config, place))?,
        config,
        tokenizer,
        renders: usable(renders),
        recommended,
        name: args.name(),
        api_key: args.api_key.clone(),
        limits: args.limits(),
        metrics: Metrics::new(),
        gate,
        created: app::now(),
    });

    let runtime = runtime().context("cannot start the threads of the server")?;
    let served = runtime.block_on(serve(&app, args, socket, passed, io));
    // Requests that are left are given up with their connections. A text may take long to become tokens.
    runtime.shutdown_background();
    served
}

/// Starts the engine, behind a progress bar for its graphs if someone watches.
///
/// # Errors
/// It cannot start.
fn start(model: Model, options: EngineOptions, io: &mut Io<'_>) -> deepseek_model::Result<Engine> {
    let bar = progress::capture(io.watched);
    let shown = bar.clone();
    let engine = Engine::start(model, options, move |done, total| {
        shown.set_length(total as u64);
        shown.set_position(done as u64);
    });
    bar.finish_and_clear();
    let mut engine = engine?;
    if let Some(error) = engine.capture_failure() {
        let _ = writeln!(io.err, "{}", GraphArgs::warning(error));
    }
    Ok(engine)
}

/// The model's chat template, in a process of its own; `None` if it has none.
///
/// # Errors
/// It cannot be read or used; names the file.
fn template(args: &ServeArgs) -> anyhow::Result<Option<Renders>> {
    let Some((template, path)) = Template::load(&args.model.model)? else {
        return Ok(None);
    };
    let renders = Renders::new(template, args.limits().body);
    renders.map(Some).with_context(|| shown(&path))
}

/// What is said of a template that cannot be used, to who asks for it.
fn usable(renders: anyhow::Result<Option<Renders>>) -> Result<Renders, String> {
    match renders {
        Ok(Some(renders)) => Ok(renders),
        Ok(None) => Err(
            "the model has no chat template: expected chat_template.jinja, or a chat_template in \
             tokenizer_config.json, beside its weights; /v1/completions needs none"
                .to_owned(),
        ),
        // Where its files are is nothing for clients.
        Err(error) => Err(format!(
            "the model's chat template cannot be used: {}",
            error.root_cause()
        )),
    }
}

fn runtime() -> std::io::Result<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(THREADS)
        .max_blocking_threads(BLOCKING_THREADS)
        .enable_all()
        .thread_name("http")
        .build()
}

/// Serves until a signal, and ends as it says.
///
/// # Errors
/// It cannot serve, or ended before requests that ran did.
async fn serve(
    app: &Arc<App>,
    args: &ServeArgs,
    socket: TcpSocket,
    mut passed: Passed,
    io: &mut Io<'_>,
) -> anyhow::Result<()> {
    let mut signals = Signals::watch().context("cannot watch for signals")?;
    let address = socket.local_addr().context("cannot listen")?;
    let listener = connections::listen(socket).with_context(|| args.listening(address))?;
    let (open, turned_away) = (
        app.metrics.connections.clone(),
        app.metrics.turned_away.clone(),
    );
    let (router, most) = (routes::router(app.clone()), args.max_connections);
    let spare = routes::spare_router(app.clone(), most);
    let connections = Connections::new(router, most, spare, open, turned_away);
    // Who starts the server need not read it.
    let _ = writeln!(io.out, "listening on http://{address}").and_then(|()| io.out.flush());

    tokio::select! {
        never = connections.accept(&listener) => match never {},
        () = signals.next() => {}
    }
    let _ = match app.gate.close() {
        0 => writeln!(io.err, "ending: no request runs"),
        run => {
            let have = if run == 1 { "has" } else { "have" };
            let (run, grace) = (count(run, "request"), args.grace);
            writeln!(io.err, "ending: {run} {have} {grace} s to come to an end")
        }
    };
    // Still accepts, so that who asks is told.
    let grace = Duration::from_secs(args.grace.into());
    let begun = Instant::now();
    let finished = tokio::select! {
        never = connections.accept(&listener) => match never {},
        finished = within(grace, &mut signals, passed.done()) => finished,
    };
    drop(listener);
    if !finished {
        bail!("ended with requests that had not come to their ends");
    }
    // Of a client that does not take its answer, or has not sent all of a request.
    let left = grace.saturating_sub(begun.elapsed()).min(LAST_BYTES);
    if !within(left, &mut signals, connections.close()).await {
        let _ = writeln!(io.err, "ended with connections that were open");
    }
    Ok(())
}

/// Does what takes long away from the threads that others wait for. Dropped before it began, it is not done.
///
/// # Errors
/// Those of `job`, or it panicked.
async fn work<T: Send + 'static>(
    job: impl FnOnce() -> error::Result<T> + Send + 'static,
) -> error::Result<T> {
    let mut jobs = JoinSet::new();
    jobs.spawn_blocking(job);
    let done = jobs.join_next().await.expect("there is one");
    done.map_err(|error| ApiError::failed(&error.to_string()))?
}
