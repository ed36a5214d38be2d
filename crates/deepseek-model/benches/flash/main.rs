//! How long DeepSeek-V4.1-Flash takes with bounded replay: time to first token by policy, decode by
//! batch and context, and where the time goes, beside what the device can do.
//!
//! The model is *flash-slice*: all of V4.1-Flash but for its engrams and with 16 routed experts a layer
//! instead of 384, so that it fits one device, with random weights. A row goes through as many experts
//! as it does in the original; a decode step of many rows reads fewer of them.
//!
//! `cargo xtask bench gpu` runs it, `cargo xtask test-gpu --archive` packs it. `--tiny` runs all of it
//! on a model of nine small layers, on any machine, in seconds.

pub(crate) mod cost;
pub(crate) mod decode;
pub(crate) mod flags;
pub(crate) mod geometry;
pub(crate) mod model;
pub(crate) mod pace;
pub(crate) mod peer;
pub(crate) mod plan;
pub(crate) mod plot;
pub(crate) mod prefill;
pub(crate) mod rates;
pub(crate) mod record;
pub(crate) mod report;
pub(crate) mod serving;
pub(crate) mod spread;
pub(crate) mod tasks;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;

use flags::Flags;

fn main() -> ExitCode {
    let flags = Flags::parse(std::env::args_os().skip(1));
    match flags.and_then(|flags| run(&flags, &mut std::io::stdout().lock())) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            note(format_args!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Tells whoever watches. A full disk behind standard error ends no run.
pub(crate) fn note(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Writes the drawing, if one is asked for.
fn draw(record: &record::Record, flags: &Flags) -> Result<()> {
    let Some(file) = &flags.svg else {
        return Ok(());
    };
    if let Some(drawing) = plot::svg(record) {
        return record::write(file, &drawing);
    }
    note("nothing to draw: of no length was `off` measured without graphs");
    Ok(())
}

/// Measures what the flags ask for; whether all that was tried could be measured.
pub(crate) fn run(flags: &Flags, out: &mut dyn Write) -> Result<bool> {
    if flags.help {
        out.write_all(flags::HELP.as_bytes())?;
        return Ok(true);
    }
    let mut pace = pace::Pace::new(flags.budget);
    let peer = flags.peer.as_deref().map(peer::Peer::read).transpose()?;
    let device = flags.device()?;
    let geometry = flags.geometry()?;
    let config = geometry.config()?;
    let rates = rates::measure(&device, flags.tiny)?;
    pace.rates(&rates);
    let mut record = record::Record::new(flags, &geometry, &config, &device, rates)?;
    // Files that cannot be written are no surprise at the end.
    for file in flags.json.iter().chain(&flags.svg) {
        record::check(file)?;
    }
    let model = model::build(config, &device, flags.seed, &mut record)?;
    for task in tasks::in_order(&geometry) {
        let done = match task {
            tasks::Task::Prefill(case) => prefill::measure(&model, &geometry, case, &pace),
            tasks::Task::Decode(case) => decode::measure(&model, case, &pace),
            tasks::Task::Serving(case) => serving::measure(&model, &geometry, case, &pace),
        };
        record.take(task, done, &mut pace);
        // After each: what is measured is kept however the run ends.
        record.save(flags.json.as_deref())?;
    }
    // Before the tables, which a reader may not take.
    draw(&record, flags)?;
    report::print(&record, out)?;
    if let Some(peer) = peer {
        peer.print(&record, out)?;
    }
    Ok(record.failed.is_empty())
}
