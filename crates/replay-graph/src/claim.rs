//! Who captures which stream: one capture at a time, or one inside a break of another.

use std::cell::Cell;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use crate::{Error, Result, StreamKey};

/// All claims of the process. Those of one stream are of one thread, the innermost last.
static CLAIMS: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

struct Entry {
    id: u64,
    stream: StreamKey,
    thread: ThreadId,
    label: String,
    /// Whether a nested capture may begin: in a break.
    in_break: bool,
}

/// The right to capture a stream, given back on drop.
#[derive(Debug)]
pub(crate) struct Claim {
    id: u64,
    stream: StreamKey,
    in_break: Cell<bool>,
    /// A capture is ended by the thread that began it.
    not_send: PhantomData<Rc<()>>,
}

impl Claim {
    /// # Errors
    ///
    /// If another thread captures the stream, or this thread does so outside a break.
    pub(crate) fn take(stream: StreamKey, label: &str) -> Result<Self> {
        let mut claims = claims();
        if let Some(outer) = innermost(&claims, stream) {
            let (label, outer_label) = (label.to_owned(), outer.label.clone());
            if outer.thread != thread::current().id() {
                return Err(Error::OtherThread {
                    label,
                    outer: outer_label,
                });
            }
            if !outer.in_break {
                return Err(Error::Nested {
                    label,
                    outer: outer_label,
                });
            }
        }
        let id = claims.iter().map(|entry| entry.id + 1).max().unwrap_or(0);
        claims.push(Entry {
            id,
            stream,
            thread: thread::current().id(),
            label: label.to_owned(),
            in_break: false,
        });
        Ok(Self {
            id,
            stream,
            in_break: Cell::new(false),
            not_send: PhantomData,
        })
    }

    /// Lets another capture begin, or no more.
    pub(crate) fn set_in_break(&self, in_break: bool) {
        if self.in_break.replace(in_break) != in_break
            && let Some(entry) = claims().iter_mut().find(|entry| entry.id == self.id)
        {
            entry.in_break = in_break;
        }
    }

    /// The stream.
    pub(crate) fn stream(&self) -> StreamKey {
        self.stream
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        claims().retain(|entry| entry.id != self.id);
    }
}

/// # Errors
///
/// If this thread is capturing the stream outside a break: what is launched then would be captured.
pub(crate) fn check_launch(stream: StreamKey, label: &str) -> Result<()> {
    match innermost(&claims(), stream) {
        Some(outer) if !outer.in_break => Err(Error::LaunchInCapture {
            label: label.to_owned(),
            outer: outer.label.clone(),
        }),
        _ => Ok(()),
    }
}

fn innermost(claims: &[Entry], stream: StreamKey) -> Option<&Entry> {
    claims.iter().rfind(|entry| entry.stream == stream)
}

fn claims() -> MutexGuard<'static, Vec<Entry>> {
    // Entries are pushed and removed whole, so a panic leaves nothing half done.
    CLAIMS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two captures of one stream would end up in one graph.
    #[test]
    fn one_capture_at_a_time() {
        let stream = StreamKey(0xc1a1);
        let outer = Claim::take(stream, "outer").unwrap();
        let nested = Claim::take(stream, "inner").unwrap_err();
        assert!(matches!(nested, Error::Nested { .. }), "{nested}");
        let elsewhere = thread::spawn(move || Claim::take(stream, "inner").map(|_| ()))
            .join()
            .unwrap()
            .unwrap_err();
        assert!(
            matches!(elsewhere, Error::OtherThread { .. }),
            "{elsewhere}"
        );
        // Another stream is another matter.
        Claim::take(StreamKey(0xc1a2), "other").unwrap();
        drop(outer);
        Claim::take(stream, "next").unwrap();
    }

    /// A graph that a break launches may be captured there, when it is first needed.
    #[test]
    fn a_break_may_capture_and_launch() {
        let stream = StreamKey(0xc1a3);
        let outer = Claim::take(stream, "outer").unwrap();
        assert!(check_launch(stream, "graph").is_err());
        outer.set_in_break(true);
        let inner = Claim::take(stream, "inner").unwrap();
        assert!(Claim::take(stream, "innermost").is_err());
        assert!(check_launch(stream, "graph").is_err());
        drop(inner);
        check_launch(stream, "graph").unwrap();
        outer.set_in_break(false);
        assert!(Claim::take(stream, "inner").is_err());
    }
}
