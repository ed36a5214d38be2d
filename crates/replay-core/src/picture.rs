//! A prefill drawn as rows against layers.

use alloc::vec::Vec;
use core::fmt;
use core::num::NonZeroU32;

use crate::Planner;
use crate::tails::{Prefill, Tail};

/// A picture of a cold prompt's prefill: the prompt from left to right, the layers from top to
/// bottom, layers that look alike in one line.
///
/// ```
/// # use core::num::NonZeroU32;
/// # use replay_core::{LayerSchedule, Planner, PlannerConfig, ReplayLayers, ReplayPolicy, Window};
/// use replay_core::Picture;
///
/// # let layers = ReplayLayers::from_schedule(&LayerSchedule {
/// #     num_layers: 8, kv_sources: &[4], compress_ratios: &[], engram_layers: &[],
/// # })?;
/// # let planner = Planner::new(PlannerConfig {
/// #     window: Window::new(8)?, layers, policy: ReplayPolicy::Exact, sampled_rows: NonZeroU32::MIN,
/// # });
/// let (chunk, columns) = (NonZeroU32::new(64).unwrap(), NonZeroU32::new(32).unwrap());
/// let picture = Picture::of(&planner, 64, chunk, columns);
/// assert_eq!(picture.to_string(), "\
/// layers 0-3 │████████████████████████████████│
/// layer    4 │░░░░░░░░░░░░░░░░░░░░░███████████│
/// layer    5 │                     ░░░▐███████│
/// layer    6 │                        ░░░░████│
/// layer    7 │                            ░░░▐│
/// ");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    layers_before_cut: u32,
    /// Of each replay layer, its columns.
    lines: Vec<Vec<Cell>>,
    columns: u32,
}

/// What happens in one layer to the rows of one column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cell {
    Skipped,
    KvOnly,
    /// Less than a quarter of the rows run.
    Few,
    Part,
    /// All of them.
    Runs,
}

impl Picture {
    /// The meaning of the characters.
    pub const LEGEND: &str = "█ runs   ▐ in part   ▕ a few rows   ░ only writes its KV";

    /// Columns of a picture at most, far wider than any screen.
    pub const MAX_COLUMNS: u32 = 4096;

    /// The prefill of `prompt_len` tokens in chunks of `chunk`, in at most `columns` columns of equal
    /// length, and at most [`MAX_COLUMNS`](Self::MAX_COLUMNS).
    pub fn of(planner: &Planner, prompt_len: u32, chunk: NonZeroU32, columns: NonZeroU32) -> Self {
        let columns = columns.get().min(prompt_len).min(Self::MAX_COLUMNS);
        let prefill = Prefill { prompt_len, chunk };
        let lines = planner.tails_in_layers().map(|(entering, running)| {
            let cell = |column| {
                let (from, to) = positions_of(column, columns, prompt_len);
                let rows = |tail: Tail| {
                    tail.running_before(to, prefill) - tail.running_before(from, prefill)
                };
                Cell::of(rows(entering), rows(running), to - from)
            };
            (0..columns).map(cell).collect()
        });
        Self {
            layers_before_cut: planner.config().layers.first(),
            lines: lines.collect(),
            columns,
        }
    }
}

/// The positions in a column, from the first to the one after the last: position `x` is in the column
/// `x * columns / prompt_len`, rounded down.
fn positions_of(column: u32, columns: u32, prompt_len: u32) -> (u32, u32) {
    // At most `prompt_len`, as `column` is at most `columns`.
    let first = |column: u32| {
        (u64::from(column) * u64::from(prompt_len)).div_ceil(u64::from(columns)) as u32
    };
    (first(column), first(column + 1))
}

impl Cell {
    fn of(entering: u32, running: u32, width: u32) -> Self {
        let (running, width) = (u64::from(running), u64::from(width));
        match (entering, running) {
            (0, _) => Self::Skipped,
            (_, 0) => Self::KvOnly,
            _ if running == width => Self::Runs,
            _ if running * 4 >= width => Self::Part,
            _ => Self::Few,
        }
    }

    const fn glyph(self) -> char {
        match self {
            Self::Skipped => ' ',
            Self::KvOnly => '░',
            Self::Few => '▕',
            Self::Part => '▐',
            Self::Runs => '█',
        }
    }
}

impl fmt::Display for Picture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole: Vec<Cell> = (0..self.columns).map(|_| Cell::Runs).collect();
        let before = (0..self.layers_before_cut).map(|_| &whole);
        let all: Vec<&Vec<Cell>> = before.chain(&self.lines).collect();

        let digits = (all.len() - 1).max(1).ilog10() as usize + 1;
        let mut layer = 0;
        for alike in all.chunk_by(|a, b| a == b) {
            let last = layer + alike.len() - 1;
            // "layers 20-39" and "layer     39" are equally wide.
            if layer == last {
                write!(f, "layer  {last:>w$}", w = 2 * digits + 1)?;
            } else {
                write!(f, "layers {layer:>digits$}-{last:<digits$}")?;
            }
            f.write_str(" │")?;
            for cell in alike[0] {
                write!(f, "{}", cell.glyph())?;
            }
            f.write_str("│\n")?;
            layer = last + 1;
        }
        Ok(())
    }
}
