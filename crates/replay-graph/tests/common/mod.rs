//! A driver that writes down what it is asked to do.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use replay_graph::{
    Backend, CaptureOptions, DeviceMemory, DriverStatus, Error, NodeCounts, Result, Segment,
    StreamKey,
};

/// What a [`TapeCapture`] writes on. A clone is another handle to the same tape.
#[derive(Clone, Default)]
pub(crate) struct Tape(Rc<Inner>);

#[derive(Default)]
struct Inner {
    lines: RefCell<Vec<String>>,
    /// The line whose call fails, and the status it fails with.
    fails: RefCell<Option<(String, u32)>>,
    /// Bytes that the graphs captured so far have taken.
    taken: Cell<u64>,
    /// Bytes that each segment takes.
    segment_bytes: Cell<u64>,
}

impl Tape {
    /// The call that writes this line fails.
    pub(crate) fn fail_at(&self, line: &str, status: u32) {
        *self.0.fails.borrow_mut() = Some((line.to_owned(), status));
    }

    /// Each segment takes so much memory.
    pub(crate) fn segments_take(&self, bytes: u64) {
        self.0.segment_bytes.set(bytes);
    }

    pub(crate) fn note(&self, line: impl Into<String>) {
        self.0.lines.borrow_mut().push(line.into());
    }

    /// What has been written since the last call.
    pub(crate) fn read(&self) -> String {
        let lines = std::mem::take(&mut *self.0.lines.borrow_mut());
        lines.join("\n")
    }

    fn call(&self, op: &'static str, line: String) -> Result<()> {
        let fails = self.0.fails.borrow().clone();
        match fails {
            Some((at, status)) if at == line => {
                *self.0.fails.borrow_mut() = None;
                self.note(format!("{line}: fails"));
                let status = DriverStatus::new(status);
                let label = "tape".to_owned();
                Err(Error::Driver { label, op, status })
            }
            _ => {
                self.note(line);
                Ok(())
            }
        }
    }
}

/// Captures nothing, and writes it down.
pub(crate) struct TapeCapture(Tape);

/// A segment of nothing.
pub(crate) struct TapeSegment {
    tape: Tape,
    index: u32,
}

impl Backend for TapeCapture {
    type Target = Tape;
    type Segment = TapeSegment;

    fn stream(tape: &Tape) -> Result<StreamKey> {
        Ok(StreamKey(Rc::as_ptr(&tape.0).addr()))
    }

    fn open(tape: &Tape, options: &CaptureOptions) -> Result<Self> {
        tape.call("open", format!("open {}", options.label))?;
        Ok(Self(tape.clone()))
    }

    fn begin(&mut self) -> Result<()> {
        self.0.call("begin", "begin".to_owned())
    }

    fn end(&mut self, index: u32) -> Result<TapeSegment> {
        self.0.call("end", format!("end segment {index}"))?;
        let bytes = self.0.0.segment_bytes.get();
        self.0.0.taken.update(|taken| taken + bytes);
        Ok(TapeSegment {
            tape: self.0.clone(),
            index,
        })
    }

    fn abort(&mut self) {
        self.0.note("abort");
    }

    fn settle(&mut self) {
        self.0.note("settle");
    }

    fn memory(&self) -> Result<DeviceMemory> {
        let taken = self.0.0.taken.get();
        Ok(DeviceMemory {
            free: (1 << 40) - taken,
            graphs: taken,
        })
    }

    fn trim(tape: &Tape) -> Result<()> {
        tape.call("trim", "trim".to_owned())
    }
}

impl Drop for TapeCapture {
    fn drop(&mut self) {
        self.0.note("restore");
    }
}

impl Segment for TapeSegment {
    fn launch(&self) -> Result<()> {
        self.tape.call("launch", format!("launch {}", self.index))
    }

    fn nodes(&self) -> NodeCounts {
        NodeCounts {
            kernels: self.index + 1,
            ..NodeCounts::default()
        }
    }
}

impl Drop for TapeSegment {
    fn drop(&mut self) {
        self.tape.note(format!("drop segment {}", self.index));
    }
}
