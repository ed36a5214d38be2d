//! Standard input and output as they are.
//!
//! The standard library puts `/dev/null` in the place of a closed stream before `main`, and later
//! takes a descriptor that is not open for what is asked of it for one that is empty, or takes all.
//! A program that cannot read its prompt or write its result should say so.

#[cfg(unix)]
pub(crate) use unix::{Stdin, stdout};

#[cfg(unix)]
mod unix {
    use std::fs::File;
    use std::io::{self, LineWriter, Read};
    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::atomic::{AtomicBool, Ordering};

    use crate::patient::Patient;

    /// `EBADF`, the same number on every Unix.
    const BAD_DESCRIPTOR: i32 = 9;

    static INPUT_CLOSED: AtomicBool = AtomicBool::new(false);
    static OUTPUT_CLOSED: AtomicBool = AtomicBool::new(false);

    /// Looks before `main`: by then a closed stream is `/dev/null`, and whoever handed in `/dev/null`
    /// does so on purpose. This is one system call on each descriptor, and needs nothing of what the
    /// standard library sets up for `main`.
    #[ctor::ctor]
    fn look() {
        let closed = |copy: io::Result<OwnedFd>| {
            copy.is_err_and(|error| error.raw_os_error() == Some(BAD_DESCRIPTOR))
        };
        let input = closed(io::stdin().as_fd().try_clone_to_owned());
        INPUT_CLOSED.store(input, Ordering::Relaxed);
        let output = closed(io::stdout().as_fd().try_clone_to_owned());
        OUTPUT_CLOSED.store(output, Ordering::Relaxed);
    }

    /// A copy of the descriptor: [`io::stdout`] takes writes to one that is not open for writing
    /// (`1< file`) and drops them.
    pub(crate) fn stdout() -> anyhow::Result<LineWriter<Patient<File>>> {
        anyhow::ensure!(
            !OUTPUT_CLOSED.load(Ordering::Relaxed),
            "standard output is closed: expected a place for the result"
        );
        let copy = io::stdout().as_fd().try_clone_to_owned()?;
        Ok(LineWriter::new(Patient(copy.into())))
    }

    /// Standard input; an error only for a program that reads it.
    #[derive(Default)]
    pub(crate) struct Stdin(Option<Patient<File>>);

    impl Read for Stdin {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            if INPUT_CLOSED.load(Ordering::Relaxed) {
                return Err(io::Error::other("it is closed"));
            }
            if self.0.is_none() {
                // A copy: `io::stdin` takes one that is not open for reading (`0> file`) for empty.
                self.0 = Some(Patient(io::stdin().as_fd().try_clone_to_owned()?.into()));
            }
            self.0.as_mut().map_or(Ok(0), |file| file.read(buffer))
        }
    }
}

#[cfg(not(unix))]
pub(crate) fn stdout() -> anyhow::Result<std::io::Stdout> {
    Ok(std::io::stdout())
}

/// Standard input.
#[cfg(not(unix))]
#[derive(Default)]
pub(crate) struct Stdin;

#[cfg(not(unix))]
impl std::io::Read for Stdin {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        std::io::stdin().read(buffer)
    }
}
