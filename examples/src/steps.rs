//! How the steps of a batch ran, and where their time went, for a person.

use std::fmt::Write as _;
use std::time::Duration;

use deepseek_model::{GenerateSummary, StepCounts};
use indicatif::HumanCount;

/// Where the time of prefill and decode steps went, phase by phase; nothing if it was not measured.
pub fn phase_table(cost: &GenerateSummary) -> String {
    let (prefill, decode) = (cost.prefill_phases, cost.decode_phases);
    if prefill.or(decode).is_none() {
        return String::new();
    }
    let [prefill, decode] = [prefill, decode].map(Option::unwrap_or_default);
    let ms = |time: Duration| format!("{:.3}", time.as_secs_f64() * 1e3);
    let mut table = format!("{:<16}{:>12}{:>12}\n", "phase, ms", "prefill", "decode");
    let phases = prefill.phases().into_iter().zip(decode.phases());
    let sums = [("total", prefill.total(), decode.total())];
    let rows = phases.map(|((name, prefill), (_, decode))| (name, prefill, decode));
    for (name, prefill, decode) in rows.chain(sums) {
        let _ = writeln!(table, "{name:<16}{:>12}{:>12}", ms(prefill), ms(decode));
    }
    table
}

/// `1 prefill: eager, dropped rows; 127 decode: 2 eager, 125 full`, without what there was none of.
pub(crate) fn steps(counts: &StepCounts) -> String {
    let kinds = [
        ("prefill", counts.prefill),
        ("mixed", counts.mixed),
        ("decode", counts.decode),
    ];
    let kinds = kinds.iter().filter(|(_, modes)| modes.total().steps > 0);
    let kinds = kinds.map(|(kind, modes)| {
        let total = modes.total();
        let named = [
            ("eager", modes.eager),
            ("piecewise", modes.piecewise),
            ("full", modes.full),
        ];
        let named = named.iter().filter(|(_, count)| count.steps > 0);
        let named = named.map(|(mode, count)| {
            if count.steps == total.steps {
                return (*mode).to_owned();
            }
            format!("{} {mode}", HumanCount(count.steps as u64))
        });
        let named = named.collect::<Vec<_>>().join(", ");
        let trimmed = match total.trimmed {
            0 => String::new(),
            n if n == total.steps => ", dropped rows".to_owned(),
            n => format!(", {} dropped rows", HumanCount(n as u64)),
        };
        format!(
            "{} {kind}: {named}{trimmed}",
            HumanCount(total.steps as u64)
        )
    });
    kinds.collect::<Vec<_>>().join("; ")
}
