//! How the steps of a batch ran, and where their time went, for a person.

use std::fmt::Write as _;
use std::time::Duration;

use deepseek_model::{GenerateSummary, StepCounts};
use indicatif::HumanCount;

/// Where the time of prefill and decode steps went, phase by phase, and what is left of it: the host's
/// work, waiting, and the choice of tokens. Nothing if it was not measured.
pub fn phase_table(cost: &GenerateSummary) -> String {
    let (prefill, decode) = (cost.prefill_phases, cost.decode_phases);
    if prefill.or(decode).is_none() {
        return String::new();
    }
    let [prefill, decode] = [prefill, decode].map(Option::unwrap_or_default);
    let ms = |time: Duration| format!("{:.3}", time.as_secs_f64() * 1e3);
    let mut table = format!("{:<16}{:>12}{:>12}\n", "phase, ms", "prefill", "decode");
    let phases = prefill.phases().into_iter().zip(decode.phases());
    let (of_prefill, of_decode) = (cost.prefill_time, cost.decode_time);
    let sums = [
        (
            "other",
            of_prefill.saturating_sub(prefill.total()),
            of_decode.saturating_sub(decode.total()),
        ),
        ("total", of_prefill, of_decode),
    ];
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

#[cfg(test)]
mod tests {
    use deepseek_model::PhaseTimes;

    use super::*;

    /// Phases that add up to less than the wall time leave the reader to wonder.
    #[test]
    fn phases_add_up_to_the_time_of_the_steps() {
        let mut phases = PhaseTimes::default();
        phases.encoder = Duration::from_millis(3);
        phases.head = Duration::from_micros(500);
        let cost = GenerateSummary {
            prefill_time: Duration::from_millis(5),
            decode_time: Duration::from_millis(2),
            prefill_phases: Some(phases),
            ..Default::default()
        };
        insta::assert_snapshot!(phase_table(&cost), @r"
        phase, ms            prefill      decode
        encoder layers         3.000       0.000
        write KV               0.000       0.000
        gather                 0.000       0.000
        replay layers          0.000       0.000
        scatter                0.000       0.000
        head                   0.500       0.000
        other                  1.500       2.000
        total                  5.000       2.000
        ");
        assert_eq!(phase_table(&GenerateSummary::default()), "");
    }
}
