//! A prefill drawn as rows against layers.

use alloc::vec::Vec;
use core::fmt;
use core::num::NonZeroU32;

use crate::Planner;
use crate::cost::for_each_chunk;

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
    Few,
    Part,
    Runs,
}

impl Picture {
    /// The meaning of the characters.
    pub const LEGEND: &str = "█ runs   ▐ in part   ▕ a few rows   ░ only writes its KV";

    /// The prefill of `prompt_len` tokens in chunks of `chunk`, in at most `columns` columns of equal
    /// length.
    pub fn of(planner: &Planner, prompt_len: u32, chunk: NonZeroU32, columns: NonZeroU32) -> Self {
        let columns = columns.get().min(prompt_len);
        let replay = planner.config().layers;
        let mut counts = Vec::new();
        counts.resize(replay.count() as usize * columns as usize, (0u64, 0u64));
        for_each_chunk(planner, prompt_len, chunk, |plan| {
            for (layer, rows) in plan.layers().enumerate() {
                let line = &mut counts[layer * columns as usize..][..columns as usize];
                let column = |x: u32| column_of(x, columns, prompt_len);
                rows.entering
                    .positions()
                    .for_each(|x| line[column(x.get())].0 += 1);
                rows.running
                    .positions()
                    .for_each(|x| line[column(x.get())].1 += 1);
            }
        });
        let cells = |line: &[(u64, u64)]| {
            line.iter()
                .enumerate()
                .map(|(column, &(entering, running))| {
                    Cell::of(
                        entering,
                        running,
                        width_of(column as u32, columns, prompt_len),
                    )
                })
                .collect()
        };
        let lines = counts.chunks(columns.max(1) as usize).map(cells).collect();
        Self {
            layers_before_cut: replay.first(),
            lines,
            columns,
        }
    }
}

/// Which of the columns holds a position.
fn column_of(x: u32, columns: u32, prompt_len: u32) -> usize {
    (u64::from(x) * u64::from(columns) / u64::from(prompt_len)) as usize
}

/// Positions in a column: those `x` for which `column_of` gives it.
fn width_of(column: u32, columns: u32, prompt_len: u32) -> u64 {
    let first =
        |column: u32| (u64::from(column) * u64::from(prompt_len)).div_ceil(u64::from(columns));
    first(column + 1) - first(column)
}

impl Cell {
    fn of(entering: u64, running: u64, width: u64) -> Self {
        match (entering, running) {
            (0, _) => Self::Skipped,
            (_, 0) => Self::KvOnly,
            _ if running * 4 >= width * 3 => Self::Runs,
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
