//! A drawing of time to first token: a bar for each policy, by phases, as a share of `off`.

use std::fmt::Write;

use deepseek_model::{PhaseTimes, ReplayPolicy};

use super::{geometry::short, prefill::Prefill, record::Record};

const COLOURS: [&str; 6] = [
    "#4c72b0", "#dd8452", "#937860", "#55a868", "#8c8c8c", "#c44e52",
];
/// What no phase has: the host's time between steps.
const HOST: &str = "#dddddd";
const LEFT: f64 = 170.0;
const WIDTH: f64 = 460.0;
const BAR: f64 = 16.0;
const GAP: f64 = 5.0;
const GROUP: f64 = 16.0;
const TOP: f64 = 52.0;

/// The drawing, of what ran without graphs, of lengths that `off` was measured at; `None` of none.
pub(crate) fn svg(record: &Record) -> Option<String> {
    let mut lengths: Vec<usize> = record.prefill.iter().map(|p| p.case.length).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let (mut body, mut y) = (String::new(), TOP);
    for length in lengths {
        let of_length = record.prefill.iter();
        let of_length = of_length.filter(|p| p.case.length == length && !p.case.graphs);
        let bars: Vec<&Prefill> = of_length.collect();
        let Some(off) = off_of(record, length) else {
            continue;
        };
        text(
            &mut body,
            8.0,
            y + BAR - 4.0,
            "start",
            &format!(
                "{} token{}",
                short(length),
                if length == 1 { "" } else { "s" }
            ),
        );
        for bar in bars {
            draw(&mut body, y, bar, off);
            y += BAR + GAP;
        }
        y += GROUP;
    }
    let longest = record.prefill.iter().filter_map(|bar| {
        let off = off_of(record, bar.case.length)?;
        (!bar.case.graphs).then_some(bar.ttft.median / off)
    });
    let longest = longest.fold(1.0, f64::max);
    let (width, height) = (LEFT + WIDTH * longest + 130.0, y + 8.0);
    let mut head = String::new();
    text(
        &mut head,
        8.0,
        18.0,
        "start",
        &format!(
            "Time to first token without graphs, as a share of off: {} on {}",
            record.name, record.device
        ),
    );
    legend(&mut head);
    let drawing = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{head}{body}</svg>\n"
    );
    (y > TOP).then_some(drawing)
}

/// Seconds of `off` at a length, without graphs.
fn off_of(record: &Record, length: usize) -> Option<f64> {
    let off = record.prefill.iter().find(|bar| {
        let case = bar.case;
        (case.length, case.policy, case.graphs) == (length, ReplayPolicy::Off, false)
    });
    off.map(|off| off.ttft.median)
}

fn draw(body: &mut String, y: f64, bar: &Prefill, off: f64) {
    let scale = WIDTH / off;
    text(
        body,
        LEFT - 6.0,
        y + BAR - 4.0,
        "end",
        &bar.case.policy.to_string(),
    );
    let mut x = LEFT;
    for (time, colour) in bar.phases.iter().zip(COLOURS) {
        let width = time.median * scale;
        if width > 0.05 {
            rect(body, [x, y, width, BAR], colour);
        }
        x += width;
    }
    let end = LEFT + bar.ttft.median * scale;
    if end > x {
        rect(body, [x, y, end - x, BAR], HOST);
    }
    let ms = bar.ttft.median * 1e3;
    let label = format!("{:.2}, {}", bar.ttft.median / off, time(ms));
    text(body, end.max(x) + 5.0, y + BAR - 4.0, "start", &label);
}

fn time(ms: f64) -> String {
    match ms {
        ..1.0 => format!("{ms:.2} ms"),
        ..1000.0 => format!("{ms:.0} ms"),
        _ => format!("{:.2} s", ms / 1e3),
    }
}

fn legend(head: &mut String) {
    let mut x = LEFT;
    for ((name, _), colour) in PhaseTimes::default().phases().iter().zip(COLOURS) {
        rect(head, [x, 28.0, 10.0, 10.0], colour);
        text(head, x + 14.0, 37.0, "start", name);
        x += 24.0 + 6.2 * name.len() as f64;
    }
    rect(head, [x, 28.0, 10.0, 10.0], HOST);
    text(head, x + 14.0, 37.0, "start", "host");
}

fn rect(to: &mut String, [x, y, width, height]: [f64; 4], colour: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(
        to,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{colour}\"/>"
    );
}

fn text(to: &mut String, x: f64, y: f64, anchor: &str, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(
        to,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>"
    );
}
