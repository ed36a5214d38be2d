//! What the programs `generate`, `perplexity` and `serve` are made of.
//!
//! Each program is a struct of flags and a `run` that takes its streams as arguments, so that tests
//! drive it without a process: [`generate`], [`perplexity`] and [`serve`]. The other modules are shared.

mod arenas;
mod backtraces;
pub mod batch;
pub mod flags;
pub mod generate;
pub mod graphs;
pub mod interrupt;
pub mod io;
mod json;
mod measure;
pub mod memory;
pub mod model;
pub mod output;
mod overlap;
mod patient;
pub mod perplexity;
pub mod picture;
pub mod progress;
pub mod prompts;
pub mod sampling;
pub mod serve;
mod session;
pub mod steps;
mod streams;
pub mod summary;
mod threads;
mod unfollowed;
mod values;
pub mod windows;

use indicatif::HumanCount;

/// `1,024 tokens`, `1 token`.
fn count(number: usize, unit: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {unit}{plural}", HumanCount(number as u64))
}

/// Four decimals; what rounds to zero has no sign.
fn decimals(value: f64) -> String {
    let text = format!("{value:.4}");
    match text.strip_prefix('-') {
        Some("0.0000") => "0.0000".to_owned(),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_agree_with_their_units_and_zero_has_no_sign() {
        assert_eq!(
            [0, 1, 1024].map(|n| count(n, "row")),
            ["0 rows", "1 row", "1,024 rows"]
        );
        let numbers = [-0.0, -0.000_04, 0.000_04, -0.000_06];
        assert_eq!(
            numbers.map(decimals),
            ["0.0000", "0.0000", "0.0000", "-0.0001"]
        );
    }
}
