//! Streams that wait where a descriptor would not.
//!
//! Whoever hands a pipe in may have made it non-blocking, for its own end: it is one open file. Then
//! an empty input and a full output are errors, of which the standard library passes on each.

use std::io::{self, ErrorKind, Read, Write};
use std::thread;
use std::time::Duration;

/// How long to wait before trying again.
const PAUSE: Duration = Duration::from_millis(2);

/// A stream that tries again until it can read or write.
#[derive(Debug)]
pub(crate) struct Patient<S>(pub(crate) S);

impl<S> Patient<S> {
    fn wait<T>(&mut self, mut run: impl FnMut(&mut S) -> io::Result<T>) -> io::Result<T> {
        loop {
            match run(&mut self.0) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(PAUSE),
                done => return done,
            }
        }
    }
}

impl<S: Read> Read for Patient<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.wait(|stream| stream.read(buffer))
    }
}

impl<S: Write> Write for Patient<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.wait(|stream| stream.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.wait(Write::flush)
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// More than a socket holds, read by somebody slow.
    #[test]
    fn a_full_pipe_that_does_not_block_is_waited_for() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let bytes: Vec<u8> = (0..4 << 20).map(|i| i as u8).collect();
        let reader = thread::spawn(move || {
            thread::sleep(PAUSE * 10);
            let mut read = Vec::new();
            theirs.read_to_end(&mut read).unwrap();
            read
        });
        let mut out = Patient(ours);
        out.write_all(&bytes).unwrap();
        out.flush().unwrap();
        drop(out);
        assert!(reader.join().unwrap() == bytes);
    }

    #[test]
    fn other_errors_are_not_waited_for() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let error = Patient(ours).write_all(b"x").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BrokenPipe);
    }
}
