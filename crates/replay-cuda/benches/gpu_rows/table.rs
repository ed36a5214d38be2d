//! The results.

use std::fmt;

/// One measurement.
pub(crate) struct Line {
    pub(crate) name: &'static str,
    /// Kept rows.
    pub(crate) rows: usize,
    /// Bytes read and bytes written.
    pub(crate) bytes: usize,
    /// Microseconds of one launch, as the host queues it.
    pub(crate) alone_us: f64,
    /// Microseconds of one in a graph of many.
    pub(crate) graph_us: f64,
    /// Microseconds of a copy that reads and writes as many bytes.
    pub(crate) copy_us: f64,
}

impl Line {
    /// Bytes per second, in terabytes.
    fn rate(&self, microseconds: f64) -> f64 {
        self.bytes as f64 / microseconds / 1e6
    }
}

/// All measurements.
pub(crate) struct Table {
    device: String,
    lines: Vec<Line>,
}

impl Table {
    pub(crate) fn new(device: String) -> Self {
        Self {
            device,
            lines: Vec::new(),
        }
    }

    pub(crate) fn push(&mut self, line: Line) {
        self.lines.push(line);
    }

    pub(crate) fn json(&self) -> String {
        let lines: Vec<_> = self
            .lines
            .iter()
            .map(|line| {
                format!(
                    "{{\"name\": \"{}\", \"rows\": {}, \"bytes\": {}, \"alone_us\": {:.2}, \
                     \"graph_us\": {:.2}, \"copy_us\": {:.2}}}",
                    line.name, line.rows, line.bytes, line.alone_us, line.graph_us, line.copy_us
                )
            })
            .collect();
        let device = &self.device;
        format!(
            "{{\"device\": \"{device}\", \"lines\": [\n{}\n]}}\n",
            lines.join(",\n")
        )
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.device)?;
        writeln!(
            f,
            "{:<20} {:>6} {:>9} {:>9} {:>9} {:>7} {:>9} {:>7} {:>8}",
            "", "rows", "MB r+w", "alone us", "graph us", "TB/s", "copy us", "TB/s", "of copy"
        )?;
        for line in &self.lines {
            writeln!(
                f,
                "{:<20} {:>6} {:>9.1} {:>9.1} {:>9.1} {:>7.2} {:>9.1} {:>7.2} {:>7.0}%",
                line.name,
                line.rows,
                line.bytes as f64 / 1e6,
                line.alone_us,
                line.graph_us,
                line.rate(line.graph_us),
                line.copy_us,
                line.rate(line.copy_us),
                100.0 * line.copy_us / line.graph_us
            )?;
        }
        Ok(())
    }
}
