//! The program's streams and files, and how a program begins and ends.

use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, anyhow, ensure};
use clap::Parser;
use deepseek_model::memory::Bytes;
use deepseek_model::plain::{Shown, is_plain};
use deepseek_model::tokenizer;

use crate::interrupt::{Interrupt, Interrupted};
use crate::{arenas, backtraces, flags, interrupt, patient::Patient, streams, threads};

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
    /// Tells of interrupts; none where the process has more to do than the program.
    pub interrupt: Option<Interrupt>,
}

/// The exit status of a program whose reader closed the pipe, as shells have it for one that SIGPIPE ended.
const CLOSED_PIPE: u8 = 128 + 13;

/// Runs a program on the process' arguments and streams and turns its error into an exit code.
///
/// A reader that closes the pipe early (`head`) has what it wanted: the program ends without a
/// word. Its status says that there was more. A standard output that was never open is an error: nobody
/// gets the result.
pub fn main<A: Parser>(program: impl FnOnce(&A, &mut Io<'_>) -> anyhow::Result<()>) -> ExitCode {
    match run(program) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_closed_pipe(&error) => ExitCode::from(CLOSED_PIPE),
        Err(error) => {
            // Nobody is left to tell if this fails too.
            let text = format!("{error:#}");
            // File names of the libraries' errors are in it as they are.
            let text = escaped(&backtraces::cut(&text), |c| c == '\n');
            let _ = writeln!(io::stderr(), "error: {text}");
            match error.downcast_ref::<Interrupted>() {
                Some(interrupted) => interrupted.status(),
                None => ExitCode::from(flags::Blame::status(&error)),
            }
        }
    }
}

fn run<A: Parser>(
    program: impl FnOnce(&A, &mut Io<'_>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut out = Named("standard output", streams::stdout()?);
    let args = match flags::parse(std::env::args_os()) {
        Ok(args) => args,
        // `--help` and `--version`: a result as any other.
        Err(text) if text.exit_code() == 0 => return text.print().context("standard output"),
        Err(refusal) => {
            let _ = io::stderr().write_all(flags::message(&refusal).as_bytes());
            std::process::exit(refusal.exit_code());
        }
    };
    arenas::bound();
    threads::start()?;
    // Without it the program does its work all the same.
    let _ = interrupt::take_long_files_for_errors();
    hide_caught_panics();
    let ended = program(
        &args,
        &mut Io {
            stdin: &mut streams::Stdin::default(),
            out: &mut out,
            // Not locked: progress bars write there from threads of their own.
            err: &mut Patient(io::stderr()),
            watched: io::stderr().is_terminal(),
            interrupt: Some(Interrupt::default()),
        },
    );
    // Also what came before an interrupt.
    out.flush()?;
    ended
}

/// Leaves it to the error to tell of a panic that becomes one.
fn hide_caught_panics() {
    let show = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !tokenizer::catches_panics() {
            show(panic);
        }
    }));
}

/// A path as messages show it: what is not plain is escaped, and a byte that is no text is `\xff`.
pub(crate) fn shown(path: &Path) -> String {
    Shown(path).to_string()
}

/// A text of which what is not plain is escaped, but what is `kept`: control characters would move the
/// cursor or colour the rest, others turn a name around or hide a part of it.
pub(crate) fn escaped(text: &str, kept: impl Fn(char) -> bool) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if is_plain(c) || kept(c) {
            escaped.push(c);
        } else {
            escaped.extend(c.escape_default());
        }
    }
    escaped
}

/// Longest name or value from outside that a message quotes, in characters.
const MAX_QUOTED: usize = 60;

/// A text of any length as a message quotes it: its beginning, with what is not plain escaped.
pub(crate) fn beginning(text: &str) -> String {
    cut(escaped(text, |_| false))
}

/// The beginning of a text that is escaped.
pub(crate) fn cut(text: String) -> String {
    match text.char_indices().nth(MAX_QUOTED) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text,
    }
}

/// The same of a name in front of what is said of it, where nothing would look like no name at all.
pub(crate) fn named(name: &str) -> String {
    match name {
        "" => "\"\"".to_owned(),
        name => beginning(name),
    }
}

/// Reads a text file, or standard input for `-`.
///
/// # Errors
/// As [`read_text`].
pub(crate) fn read_text_or(path: &Path, stdin: &mut dyn Read) -> anyhow::Result<String> {
    if !is_dash(path) {
        return read_text(path);
    }
    text(read_bytes(stdin).context("cannot read standard input")?)
}

/// Whether a path stands for a standard stream.
pub(crate) fn is_dash(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Reads a text file, or a pipe under its name.
///
/// # Errors
/// It cannot be read: then the error says where a relative path was looked for. Or it is no UTF-8.
pub(crate) fn read_text(path: &Path) -> anyhow::Result<String> {
    let bytes = open(path).and_then(|mut file| read_bytes(&mut file));
    text(match absolute(path) {
        Some(at) => bytes.with_context(|| format!("cannot read {at}"))?,
        None => bytes?,
    })
}

/// Opens what a text can be read from. Of a link to nowhere the system says that there is no such file,
/// and a directory it opens.
fn open(path: &Path) -> io::Result<File> {
    let file = File::open(path).map_err(|error| match path.read_link() {
        Ok(target) if error.kind() == io::ErrorKind::NotFound => io::Error::other(format!(
            "expected a file, found a symbolic link to {}, which is not there",
            shown(&target)
        )),
        _ => error,
    })?;
    if file.metadata()?.is_dir() {
        return Err(io::Error::other("expected a file, found a directory"));
    }
    Ok(file)
}

/// Bytes of a text at most. A model takes a million tokens of some bytes each; a device that never
/// ends would otherwise be read until memory does.
const MAX_TEXT_BYTES: u64 = 256 << 20;

/// All bytes of a text.
///
/// # Errors
/// They cannot be read, or are more than a text has.
pub(crate) fn read_bytes(from: &mut dyn Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = from.take(MAX_TEXT_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(|error| match error.kind() {
        // The error's own words do not say of what.
        io::ErrorKind::OutOfMemory => io::Error::other(format!(
            "expected a text that memory holds, got one of more than {}",
            Bytes(bytes.len() as u64)
        )),
        _ => error,
    })?;
    if bytes.len() as u64 > MAX_TEXT_BYTES {
        return Err(io::Error::other(format!(
            "expected a text of at most {} MiB, got more",
            MAX_TEXT_BYTES >> 20
        )));
    }
    Ok(bytes)
}

/// The text of a file, without the byte-order mark that some programs begin one with: it would be a token
/// that nobody sees.
///
/// # Errors
/// As [`utf8`]; of UTF-16, which those programs write, too, that it is that.
fn text(mut bytes: Vec<u8>) -> anyhow::Result<String> {
    ensure!(
        !bytes.starts_with(b"\xff\xfe") && !bytes.starts_with(b"\xfe\xff"),
        "expected UTF-8 text, got UTF-16, by its byte-order mark"
    );
    if bytes.starts_with(BYTE_ORDER_MARK) {
        bytes.drain(..BYTE_ORDER_MARK.len());
    }
    utf8(bytes)
}

/// U+FEFF in UTF-8.
pub(crate) const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// Text from bytes.
///
/// # Errors
/// Says where the bytes are no UTF-8.
pub(crate) fn utf8(bytes: Vec<u8>) -> anyhow::Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let byte = error.as_bytes()[at];
        anyhow!("expected UTF-8 text, got byte 0x{byte:02x} at offset {at}")
    })
}

/// Where a relative path leads from the current directory; none for a path that says so itself.
pub(crate) fn absolute(path: &Path) -> Option<String> {
    let at = std::path::absolute(path).ok()?;
    path.is_relative().then(|| shown(&at))
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

    /// A name can hold what clears a terminal, or what makes a program look like a text.
    #[test]
    fn characters_of_names_that_are_not_plain_are_escaped() {
        let name = Path::new("a\u{1b}[31m\nb\u{9b}é \u{202e}txt.exe");
        insta::assert_snapshot!(shown(name), @r"a\u{1b}[31m\nb\u{9b}é \u{202e}txt.exe");
        assert_eq!(escaped("a\nb\r", |c| c == '\n'), "a\nb\\r");
    }

    /// Names of files are any bytes: two that differ in such a byte must not look the same.
    #[cfg(unix)]
    #[test]
    fn bytes_of_names_that_are_no_text_are_shown() {
        use std::os::unix::ffi::OsStrExt;
        let name = std::ffi::OsStr::from_bytes(b"a\xff\xe9 \xc3\xa9\xe2\x82");
        insta::assert_snapshot!(shown(Path::new(name)), @r"a\xff\xe9 é\xe2\x82");
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
