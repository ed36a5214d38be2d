//! The tables, in Markdown, as docs/benchmarks.md keeps them.

use std::io::{Result, Write};

use deepseek_model::{PhaseTimes, ReplayPolicy};

use super::{
    cost::Work,
    decode::Decode,
    geometry::short,
    prefill::Prefill,
    rates::Rates,
    record::{Capture, Record},
    spread::Spread,
};

/// Prints everything.
pub(crate) fn print(record: &Record, out: &mut dyn Write) -> Result<()> {
    head(record, out)?;
    prompts(record, out)?;
    phases(record, out)?;
    decode(record, out)?;
    serving(record, out)?;
    captures(record, out)?;
    for (title, lines) in [("skipped", &record.skipped), ("FAILED", &record.failed)] {
        for line in lines {
            writeln!(out, "{title}: {line}")?;
        }
    }
    let (seconds, budget) = (record.seconds, record.budget);
    writeln!(out, "\n{seconds:.0} s of a budget of {budget:.0} s")
}

fn head(record: &Record, out: &mut dyn Write) -> Result<()> {
    let (rates, model) = (&record.rates, &record.model);
    writeln!(out, "{} on {}", record.name, record.device)?;
    writeln!(
        out,
        "copy {} TB/s (read and written), matmul {} TFLOP/s",
        spread(rates.copy, 1e-12, 3),
        spread(rates.matmul, 1e-12, 1)
    )?;
    let bytes = model
        .bytes
        .map_or("unknown".into(), |b| format!("{:.1} GB", b as f64 / 1e9));
    let [least, most] = model.expert_shares;
    writeln!(
        out,
        "weights {bytes}, drawn in {:.1} s; an expert gets {least:.2} to {most:.2} of an even share",
        model.seconds
    )
}

fn prompts(record: &Record, out: &mut dyn Write) -> Result<()> {
    if record.prefill.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\nTime to first token, chunks of {} rows.\n",
        record.chunk
    )?;
    writeln!(
        out,
        "| prompt | graphs | policy | ms (least .. most, runs) | of off | row-layers | of matmul | of copy | GiB at most | ran as |"
    )?;
    writeln!(out, "|---|---|---|---|---|---|---|---|---|---|")?;
    for prefill in &record.prefill {
        let case = prefill.case;
        let [matmul, copy] = shares(prefill.total(), prefill.ttft.median, &record.rates);
        writeln!(
            out,
            "| {} | {} | {} | {} | {} | {:.3} | {matmul} | {copy} | {} | {} |",
            short(case.length),
            on(case.graphs),
            case.policy,
            with_runs(prefill.ttft),
            of_off(record, prefill),
            prefill.row_layers,
            gib(prefill.peak_bytes),
            prefill.mode
        )?;
    }
    Ok(())
}

/// The ratio to the prompt that differs in the policy only.
fn of_off(record: &Record, prefill: &Prefill) -> String {
    let (length, graphs) = (prefill.case.length, prefill.case.graphs);
    let off = record.prefill.iter().find(|other| {
        let case = other.case;
        (case.length, case.graphs, case.policy) == (length, graphs, ReplayPolicy::Off)
    });
    off.map_or(String::new(), |off| {
        format!("{:.3}", prefill.ttft.median / off.ttft.median)
    })
}

fn phases(record: &Record, out: &mut dyn Write) -> Result<()> {
    if record.prefill.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nTime of each phase on the device.\n")?;
    writeln!(
        out,
        "| prompt | graphs | policy | phase | ms (least .. most) | of matmul | of copy |"
    )?;
    writeln!(out, "|---|---|---|---|---|---|---|")?;
    let names = PhaseTimes::default().phases().map(|(name, _)| name);
    for prefill in &record.prefill {
        for ((name, time), work) in names.iter().zip(prefill.phases).zip(prefill.work) {
            let [matmul, copy] = shares(work, time.median, &record.rates);
            let case = prefill.case;
            writeln!(
                out,
                "| {} | {} | {} | {name} | {} | {matmul} | {copy} |",
                short(case.length),
                on(case.graphs),
                case.policy,
                spread(time, 1e3, 2)
            )?;
        }
    }
    Ok(())
}

fn decode(record: &Record, out: &mut dyn Write) -> Result<()> {
    if record.decode.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nDecode.\n")?;
    writeln!(
        out,
        "| sequences | context | graphs | ms a step (least .. most, runs) | on the device | tokens/s | of matmul | of copy | GiB at most | ran as |"
    )?;
    writeln!(out, "|---|---|---|---|---|---|---|---|---|---|")?;
    for decode in &record.decode {
        let Decode { case, step, .. } = decode;
        let [matmul, copy] = shares(decode.total(), step.median, &record.rates);
        writeln!(
            out,
            "| {} | {} | {} | {} | {} | {:.1} | {matmul} | {copy} | {} | {} |",
            case.batch,
            short(case.context),
            on(case.graphs),
            with_runs(*step),
            spread(decode.device, 1e3, 2),
            case.batch as f64 / step.median,
            gib(decode.peak_bytes),
            decode.mode
        )?;
    }
    Ok(())
}

fn serving(record: &Record, out: &mut dyn Write) -> Result<()> {
    if record.serving.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\nServing: prompts with a common beginning; seconds, but for planning.\n"
    )?;
    writeln!(
        out,
        "| requests | shared + own + new tokens | first token, cold | with a hit | alone, to the end | all at once, to the end | their first tokens | tokens/s, one by one and at once | planning a step, µs | of steps that decode | choosing tokens, ms |"
    )?;
    writeln!(out, "|---|---|---|---|---|---|---|---|---|---|---|")?;
    for serving in &record.serving {
        let (case, [alone, together]) = (serving.case, serving.rates());
        writeln!(
            out,
            "| {} | {} + {} + {} | {:.3} | {} | {} | {:.2} | {} | {alone:.1}, {together:.1} | {} | {} | {} |",
            case.requests,
            short(case.shared),
            short(case.own),
            case.new,
            serving.cold,
            spread(serving.hit, 1.0, 3),
            spread(serving.alone, 1.0, 3),
            serving.together,
            spread(serving.together_ttft, 1.0, 2),
            spread(serving.planning, 1e6, 0),
            spread(serving.decode_planning, 1e6, 0),
            spread(serving.choosing, 1e3, 2),
        )?;
    }
    Ok(())
}

fn captures(record: &Record, out: &mut dyn Write) -> Result<()> {
    let prompts = record.prefill.iter().filter_map(|prefill| {
        let (length, policy) = (short(prefill.case.length), prefill.case.policy);
        Some((format!("prompt of {length}, {policy}"), prefill.capture?))
    });
    let decodes = record.decode.iter().filter_map(|decode| {
        let (batch, context) = (decode.case.batch, short(decode.case.context));
        Some((
            format!("decode of {batch} after {context}"),
            decode.capture?,
        ))
    });
    let captures: Vec<(String, Capture)> = prompts.chain(decodes).collect();
    if captures.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nCapturing.\n")?;
    writeln!(
        out,
        "| of | graphs | seconds | MiB of the device | MiB for graphs |"
    )?;
    writeln!(out, "|---|---|---|---|---|")?;
    for (of, capture) in captures {
        writeln!(
            out,
            "| {of} | {} | {:.2} | {} | {} |",
            capture.graphs,
            capture.seconds,
            capture.device_bytes >> 20,
            capture.graph_bytes >> 20
        )?;
    }
    writeln!(out)
}

fn gib(bytes: Option<u64>) -> String {
    let gib = |bytes| format!("{:.1}", bytes as f64 / f64::from(1 << 30));
    bytes.map_or_else(String::new, gib)
}

fn on(graphs: bool) -> &'static str {
    if graphs { "on" } else { "off" }
}

/// A median with what it lies between.
fn spread(spread: Spread, unit: f64, digits: usize) -> String {
    let Spread {
        median,
        least,
        most,
        ..
    } = spread.map(|value| value * unit);
    format!("{median:.digits$} ({least:.digits$} .. {most:.digits$})")
}

/// Seconds as milliseconds, and how often they were measured.
fn with_runs(times: Spread) -> String {
    let text = spread(times, 1e3, 2);
    format!("{}, {})", text.trim_end_matches(')'), times.runs)
}

/// What the time is of the device's rates: operations done, and bytes that had to move.
fn shares(work: Work, seconds: f64, rates: &Rates) -> [String; 2] {
    let share = |amount: f64, rate: Spread| {
        let share = amount / seconds / rate.median;
        if share.is_finite() && amount > 0.0 {
            format!("{:.1} %", share * 100.0)
        } else {
            String::new()
        }
    };
    [
        share(work.flops, rates.matmul),
        share(work.bytes, rates.copy),
    ]
}
