//! The program's streams, and how a program ends.

use std::io::{self, IsTerminal, Read, Write};
use std::process::ExitCode;

/// Where a program reads and writes.
pub struct Io<'a> {
    /// Prompts, when asked for with `-`.
    pub stdin: &'a mut dyn Read,
    /// The result and nothing else.
    pub out: &'a mut dyn Write,
    /// What is meant for a person: summaries and pictures.
    pub err: &'a mut dyn Write,
    /// Whether a person watches, so that progress bars are of use.
    pub watched: bool,
}

/// Runs a program on the process' streams and turns its error into an exit code.
///
/// A reader that closes the pipe early (`head`) has what it wanted: the program ends without a
/// word.
pub fn main(program: impl FnOnce(&mut Io<'_>) -> anyhow::Result<()>) -> ExitCode {
    let result = program(&mut Io {
        stdin: &mut io::stdin().lock(),
        out: &mut Named("standard output", io::stdout().lock()),
        // Not locked: progress bars write there from threads of their own.
        err: &mut io::stderr(),
        watched: io::stderr().is_terminal(),
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody is left to tell if this fails too.
            let _ = writeln!(io::stderr(), "error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// A stream whose errors say which one it is.
struct Named<W>(&'static str, W);

impl<W: Write> Named<W> {
    fn name<T>(&self, result: io::Result<T>) -> io::Result<T> {
        result.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", self.0)))
    }
}

impl<W: Write> Write for Named<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.1.write(bytes);
        self.name(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        let flushed = self.1.flush();
        self.name(flushed)
    }
}

/// Whether a stream failed because its reader is gone.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let cause = error.root_cause().downcast_ref::<io::Error>();
    cause.is_some_and(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn a_closed_pipe_is_seen_through_context() {
        let closed = io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(is_closed_pipe(&anyhow::Error::from(closed)));
        let closed: Result<(), _> = Err(io::Error::from(io::ErrorKind::BrokenPipe));
        assert!(is_closed_pipe(
            &closed.context("writing the result").unwrap_err()
        ));
        assert!(!is_closed_pipe(&anyhow::anyhow!("broken pipe")));
    }

    #[test]
    fn a_stream_names_itself() {
        struct Failing(io::ErrorKind);
        impl Write for Failing {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(self.0.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Err(self.0.into())
            }
        }
        let mut stream = Named("standard output", Failing(io::ErrorKind::StorageFull));
        assert_eq!(
            stream.flush().unwrap_err().to_string(),
            "standard output: no storage space"
        );
        let closed = Named("standard output", Failing(io::ErrorKind::BrokenPipe)).write(b"x");
        assert!(is_closed_pipe(&closed.unwrap_err().into()));
    }
}
