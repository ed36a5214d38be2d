//! Which rows of a prompt ran in which layer, counted and drawn from what the steps report.

use std::fmt;
use std::ops::Range;

use deepseek_model::StepStats;

use crate::count;

/// Which rows of one sequence ran in which layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowMap {
    prompt_len: usize,
    /// Rows of the sequence so far.
    len: usize,
    layers: Vec<LayerMap>,
}

/// Positions, ascending and apart.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct LayerMap {
    /// Rows whose window KV was written.
    written: Spans,
    /// Rows that went through the whole layer.
    run: Spans,
}

impl RowMap {
    /// Nothing has run yet of a prompt of `prompt_len` tokens in a model of `layers` layers.
    pub fn new(prompt_len: usize, layers: usize) -> Self {
        Self {
            prompt_len,
            len: 0,
            layers: vec![LayerMap::default(); layers],
        }
    }

    /// Adds the sequence's part in a step: `request` is its index there.
    pub fn record(&mut self, stats: &StepStats, request: usize) {
        self.len += stats.query_rows[request];
        for (map, layer) in self.layers.iter_mut().zip(&stats.layers) {
            // Of each request a layer takes the last rows.
            map.written
                .push(self.len - layer.written[request]..self.len);
            map.run.push(self.len - layer.run[request]..self.len);
        }
    }

    /// Rows of the prompt that are computed.
    pub fn prefilled(&self) -> usize {
        self.len.min(self.prompt_len)
    }

    /// Row-layers of the prompt that ran: one for each row in each layer.
    pub fn prefill_row_layers(&self) -> usize {
        self.layers
            .iter()
            .map(|layer| layer.run.count(0..self.prompt_len))
            .sum()
    }

    /// Row-layers of the prompt, as far as it is computed, had no row been dropped.
    pub fn prefill_row_layers_without_replay(&self) -> usize {
        self.prefilled() * self.layers.len()
    }

    /// Draws the prompt from left to right in `columns` columns, the layers from top to bottom,
    /// layers that look alike in one line.
    pub fn picture(&self, columns: usize) -> Picture {
        let columns = columns.clamp(1, self.prompt_len.max(1));
        let edge = |column: usize| column * self.prompt_len / columns;
        let cells = |layer: &LayerMap| Line {
            cells: (0..columns)
                .map(|c| Cell::of(layer, edge(c)..edge(c + 1)))
                .collect(),
            rows: layer.run.count(0..self.prompt_len),
        };
        Picture {
            lines: self.layers.iter().map(cells).collect(),
        }
    }
}

/// Ranges, ascending and apart.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Spans(Vec<Range<usize>>);

impl Spans {
    /// Adds a range behind all others.
    fn push(&mut self, range: Range<usize>) {
        match self.0.last_mut() {
            _ if range.is_empty() => {}
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.0.push(range),
        }
    }

    /// How many positions of `range` are covered.
    fn count(&self, range: Range<usize>) -> usize {
        let common = |span: &Range<usize>| {
            span.end
                .min(range.end)
                .saturating_sub(span.start.max(range.start))
        };
        self.0.iter().map(common).sum()
    }
}

/// A prefill drawn as rows against layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    /// One per layer.
    lines: Vec<Line>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Line {
    cells: Vec<Cell>,
    /// Prompt rows that ran.
    rows: usize,
}

impl Picture {
    /// The meaning of the characters.
    pub const LEGEND: &str = "█ ran   ▐ ran in part   ▕ a few rows ran   ░ only its KV was written";
}

/// What happened in one layer to the rows of one column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cell {
    LeftOut,
    KvOnly,
    /// Less than a quarter of the rows ran.
    Few,
    Part,
    /// All of them.
    Ran,
}

impl Cell {
    fn of(layer: &LayerMap, column: Range<usize>) -> Self {
        let width = column.len();
        let (run, written) = (layer.run.count(column.clone()), layer.written.count(column));
        match (run, written) {
            (0, 0) => Self::LeftOut,
            (0, _) => Self::KvOnly,
            _ if run == width => Self::Ran,
            _ if run * 4 >= width => Self::Part,
            _ => Self::Few,
        }
    }

    fn glyph(self) -> char {
        match self {
            Self::LeftOut => ' ',
            Self::KvOnly => '░',
            Self::Few => '▕',
            Self::Part => '▐',
            Self::Ran => '█',
        }
    }
}

impl fmt::Display for Picture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.lines.len().saturating_sub(1).max(1).ilog10() as usize + 1;
        let mut first = 0;
        for alike in self.lines.chunk_by(|a, b| a == b) {
            let last = first + alike.len() - 1;
            let name = if first == last {
                format!("layer  {last:>width$}", width = 2 * digits + 1)
            } else {
                format!("layers {first:>digits$}-{last:<digits$}")
            };
            let cells: String = alike[0].cells.iter().map(|cell| cell.glyph()).collect();
            writeln!(f, "{name} │{cells}│ {}", count(alike[0].rows, "row"))?;
            first = last + 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use deepseek_model::LayerStats;

    use super::*;

    /// A step of one request: rows, then `(written, run)` of each layer.
    fn step(rows: usize, layers: &[(usize, usize)]) -> StepStats {
        let layer = |&(written, run): &(usize, usize)| LayerStats {
            written: vec![written],
            run: vec![run],
        };
        StepStats {
            query_rows: vec![rows],
            layers: layers.iter().map(layer).collect(),
        }
    }

    /// 40 rows in two chunks through four layers; the last three replay the last 8 rows.
    fn bounded() -> RowMap {
        let mut map = RowMap::new(40, 4);
        map.record(&step(30, &[(30, 30), (30, 0), (0, 0), (0, 0)]), 0);
        map.record(&step(10, &[(10, 10), (10, 8), (8, 8), (8, 8)]), 0);
        map.record(&step(1, &[(1, 1); 4]), 0);
        map
    }

    #[test]
    fn layers_that_look_alike_share_a_line() {
        insta::assert_snapshot!(bounded().picture(10).to_string(), @r"
        layer    0 │██████████│ 40 rows
        layer    1 │░░░░░░░░██│ 8 rows
        layers 2-3 │        ██│ 8 rows
        ");
    }

    /// Nine of ten rows are not all of them.
    #[test]
    fn a_column_shows_how_much_of_it_ran() {
        let mut map = RowMap::new(40, 3);
        map.record(&step(40, &[(40, 1), (40, 12), (12, 9)]), 0);
        insta::assert_snapshot!(map.picture(4).to_string(), @r"
        layer    0 │░░░▕│ 1 row
        layer    1 │░░▕█│ 12 rows
        layer    2 │  ░▐│ 9 rows
        ");
    }

    #[test]
    fn a_short_prompt_has_a_column_per_row() {
        let mut map = RowMap::new(3, 1);
        map.record(&step(3, &[(3, 3)]), 0);
        assert_eq!(map.picture(60).to_string(), "layer    0 │███│ 3 rows\n");
    }

    #[test]
    fn row_layers_count_the_prompt_only() {
        let map = bounded();
        assert_eq!(map.prefill_row_layers(), 40 + 3 * 8);
        assert_eq!(map.prefill_row_layers_without_replay(), 160);
    }

    #[test]
    fn a_request_finds_its_own_rows_in_a_batch() {
        let stats = StepStats {
            query_rows: vec![5, 2],
            layers: vec![LayerStats {
                written: vec![5, 2],
                run: vec![0, 2],
            }],
        };
        let mut map = RowMap::new(2, 1);
        map.record(&stats, 1);
        assert_eq!(map.prefill_row_layers(), 2);
    }
}
