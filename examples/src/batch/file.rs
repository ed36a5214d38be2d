//! Where results go, and what is there from a run before.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{File, TryLockError};
use std::io::{self, BufRead, BufReader, Seek, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail, ensure};

use super::Order;
use super::id::Id;
use super::record::{self, Known};
use super::request::Request;
use crate::io::shown;

/// How each result begins: the end of a file that does not is no result that was cut off.
const BEGINNING: &[u8] = b"{\"line\":";

/// The results of a batch. Each is given to the system in one piece, so that whatever ends the program,
/// a file holds whole lines and at most one that is not.
pub(super) struct Results<'a> {
    place: Place<'a>,
    order: Order,
    /// For `--order input`, the request whose result is next.
    next: usize,
    /// Results by request that others must come before.
    waiting: BTreeMap<usize, Vec<u8>>,
    /// Requests whose results are there or wait.
    known: Vec<bool>,
    /// How many of those that were there are errors.
    errors: usize,
}

enum Place<'a> {
    Stream(&'a mut dyn Write),
    Files(Files),
}

/// The files of `--output`.
struct Files {
    /// Locked as long as it is open.
    main: File,
    /// For errors.
    name: String,
    /// The results that wait, once there are any.
    pending: Option<File>,
    pending_path: PathBuf,
}

impl<'a> Results<'a> {
    /// Results of so many requests on a stream.
    pub(super) fn stream(to: &'a mut dyn Write, order: Order, count: usize) -> Self {
        Self::new(Place::Stream(to), order, count)
    }

    /// Results in a file, which may hold some, of a model with so many token ids; and what to tell of it.
    ///
    /// # Errors
    /// It cannot be opened, another run writes to it, or it holds something else.
    pub(super) fn open(
        path: &Path,
        order: Order,
        requests: &[Request],
        vocabulary: usize,
    ) -> anyhow::Result<(Self, Vec<String>)> {
        let mut files = Files::open(path)?;
        let mut reader = Reader::new(requests, vocabulary);
        let (mut there, mut waiting) = (Vec::new(), Vec::new());
        let in_order = |index, there: &[usize]| order == Order::Finished || index == there.len();
        let mut notes = Vec::new();
        notes.extend(reader.read(&mut files.main, &files.name, |index, _| {
            ensure!(
                in_order(index, &there),
                "expected the results in the order of the requests (--order input): take --order \
                 finished, or another file"
            );
            there.push(index);
            Ok(())
        })?);
        if files.pending_path.exists() {
            let name = files.pending_name();
            // What waited may have been written since.
            reader.seen.clear();
            notes.extend(reader.read(files.pending()?, &name, |index, line| {
                waiting.push((index, line));
                Ok(())
            })?);
        }
        let mut results = Self::new(Place::Files(files), order, requests.len());
        results.next = there.len();
        results.errors = reader.errors.len();
        there.iter().for_each(|&index| results.known[index] = true);
        for (index, line) in waiting {
            if !results.known[index] {
                results.put(index, line)?;
            }
        }
        if let (Place::Files(files), Order::Finished) = (&mut results.place, order) {
            files.remove_pending()?;
        }
        Ok((results, notes))
    }

    fn new(place: Place<'a>, order: Order, count: usize) -> Self {
        Self {
            place,
            order,
            next: 0,
            waiting: BTreeMap::new(),
            known: vec![false; count],
            errors: 0,
        }
    }

    /// Whether there is a result of a request.
    pub(super) fn has(&self, index: usize) -> bool {
        self.known[index]
    }

    /// Results that outlive the run, wherever it ends. Those that wait for others of a stream do not.
    pub(super) fn kept(&self) -> usize {
        match self.place {
            Place::Stream(_) => self.count() - self.waiting.len(),
            Place::Files(_) => self.count(),
        }
    }

    /// Whether a later run goes on from them.
    pub(super) fn is_file(&self) -> bool {
        matches!(self.place, Place::Files(_))
    }

    /// Results that there are.
    pub(super) fn count(&self) -> usize {
        self.known.iter().filter(|known| **known).count()
    }

    /// How many of the results that were there say only why there is none.
    pub(super) fn errors(&self) -> usize {
        self.errors
    }

    /// Takes the result of a request, a line without its end.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn give(&mut self, index: usize, mut line: Vec<u8>) -> anyhow::Result<()> {
        line.push(b'\n');
        if self.order == Order::Input
            && index != self.next
            && let Place::Files(files) = &mut self.place
        {
            let written = files.pending()?.write_all(&line);
            written.with_context(|| files.pending_name())?;
        }
        self.put(index, line)
    }

    /// Writes a result when it is its turn.
    fn put(&mut self, index: usize, line: Vec<u8>) -> anyhow::Result<()> {
        self.known[index] = true;
        if self.order == Order::Finished {
            return self.place.write(&line);
        }
        self.waiting.insert(index, line);
        while let Some(line) = self.waiting.remove(&self.next) {
            self.place.write(&line)?;
            self.next += 1;
        }
        Ok(())
    }

    /// All results have come: waits until they are on the disk.
    ///
    /// # Errors
    /// They are not.
    pub(super) fn finish(self) -> anyhow::Result<()> {
        debug_assert!(self.waiting.is_empty(), "each result has its turn");
        let Place::Files(mut files) = self.place else {
            return Ok(());
        };
        let synced = files.main.sync_data();
        synced.with_context(|| files.name.clone())?;
        files.remove_pending()
    }
}

impl Place<'_> {
    fn write(&mut self, line: &[u8]) -> anyhow::Result<()> {
        match self {
            Self::Files(files) => {
                let written = files.main.write_all(line);
                written.with_context(|| files.name.clone())
            }
            // It says itself which stream it is, and who closed a pipe.
            Self::Stream(to) => {
                to.write_all(line)?;
                Ok(to.flush()?)
            }
        }
    }
}

impl Files {
    fn open(path: &Path) -> anyhow::Result<Self> {
        let name = format!("--output {}", shown(path));
        let main = append(path).map_err(|error| nowhere(path, error));
        let main = main.with_context(|| name.clone())?;
        let kind = main.metadata().with_context(|| name.clone())?;
        ensure!(
            kind.is_file(),
            "{name}: expected a file; without the flag, results go to standard output"
        );
        match main.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!("{name}: another run writes to it"),
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("{name}: cannot lock it"));
            }
        }
        let mut pending = path.as_os_str().to_owned();
        pending.push(".pending");
        Ok(Self {
            main,
            name,
            pending: None,
            pending_path: pending.into(),
        })
    }

    /// The file of the results that wait, for errors. Nobody named it but by the flag.
    fn pending_name(&self) -> String {
        format!("{}, {}", self.name, shown(&self.pending_path))
    }

    /// The file of the results that wait.
    fn pending(&mut self) -> anyhow::Result<&mut File> {
        if self.pending.is_none() {
            let file = append(&self.pending_path);
            self.pending = Some(file.with_context(|| self.pending_name())?);
        }
        Ok(self.pending.as_mut().expect("it is open"))
    }

    fn remove_pending(&mut self) -> anyhow::Result<()> {
        self.pending = None;
        match std::fs::remove_file(&self.pending_path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("{}: cannot remove it", self.pending_name()))
            }
            _ => Ok(()),
        }
    }
}

/// Reads files of results.
struct Reader<'a> {
    requests: &'a [Request],
    vocabulary: usize,
    by_id: HashMap<&'a Id, usize>,
    /// Lines of a file by request.
    seen: HashMap<usize, usize>,
    /// Requests whose result is an error.
    errors: HashSet<usize>,
}

impl<'a> Reader<'a> {
    fn new(requests: &'a [Request], vocabulary: usize) -> Self {
        let ids = requests.iter().enumerate();
        Self {
            requests,
            vocabulary,
            by_id: ids.map(|(index, r)| (&r.id, index)).collect(),
            seen: HashMap::new(),
            errors: HashSet::new(),
        }
    }

    /// Hands the results of a file to `each`, by request. The file is cut where the last one was not
    /// written to its end; then there is a note of it.
    fn read(
        &mut self,
        file: &mut File,
        name: &str,
        mut each: impl FnMut(usize, Vec<u8>) -> anyhow::Result<()>,
    ) -> anyhow::Result<Option<String>> {
        let mut whole = 0;
        let mut reader = BufReader::new(&mut *file);
        reader.rewind().with_context(|| name.to_owned())?;
        for number in 1.. {
            let at = || format!("{name} line {number}");
            let mut line = Vec::new();
            let read = reader.read_until(b'\n', &mut line);
            if read.with_context(|| name.to_owned())? == 0 {
                break;
            }
            if !line.ends_with(b"\n") {
                let note = End::of(&line).note();
                let note = note.with_context(|| format!("{}: {}", at(), record::NO_RESULT))?;
                file.set_len(whole).with_context(|| name.to_owned())?;
                return Ok(Some(format!("note: {}: {note}", at())));
            }
            whole += line.len() as u64;
            let known = Known::parse(&line).with_context(at)?;
            let index = self.check(&known).with_context(at)?;
            if let Some(before) = self.seen.insert(index, number) {
                bail!("{}: id {} has a result in line {before}", at(), known.id);
            }
            if known.is_error() {
                self.errors.insert(index);
            }
            each(index, line).with_context(at)?;
        }
        Ok(None)
    }

    /// The request that a result answers.
    fn check(&self, known: &Known) -> anyhow::Result<usize> {
        let index = self.by_id.get(&known.id).copied();
        let index = index.ok_or_else(|| record::unknown(&known.id))?;
        known.check(&self.requests[index], self.vocabulary)?;
        Ok(index)
    }
}

/// What is at the end of a file behind the last whole line.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// A result that was cut off.
    Half,
    /// What stands, where the power failed, for what was not written: zeros alone.
    Zeros,
    /// What no run of a batch wrote.
    Other,
}

impl End {
    fn of(line: &[u8]) -> Self {
        let zeros = line.iter().rev().take_while(|byte| **byte == 0).count();
        match &line[..line.len() - zeros] {
            [] => Self::Zeros,
            half if half.starts_with(BEGINNING) || BEGINNING.starts_with(half) => Self::Half,
            _ => Self::Other,
        }
    }

    /// What to tell of it, if a run can go on from there.
    fn note(&self) -> Option<&'static str> {
        match self {
            Self::Half => Some("half a result, whose request is computed again"),
            Self::Zeros => Some("zeros behind the last result are cut off"),
            Self::Other => None,
        }
    }
}

/// What is wrong where the system says of a file that is to be made that there is none.
fn nowhere(path: &Path, error: io::Error) -> anyhow::Error {
    use io::ErrorKind::{NotADirectory, NotFound};
    if !matches!(error.kind(), NotADirectory | NotFound) {
        return error.into();
    }
    if let Ok(target) = path.read_link() {
        let target = shown(&target);
        return anyhow!(
            "expected a file, found a symbolic link to {target}, where none can be made"
        );
    }
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    let dir = dir.unwrap_or(Path::new("."));
    let name = shown(dir);
    match dir.metadata() {
        Ok(found) if found.is_dir() => anyhow!("the directory {name} takes no file: {error}"),
        Ok(_) => anyhow!("expected a directory at {name}, found something else"),
        Err(_) => anyhow!("expected a directory at {name}, there is none"),
    }
}

fn append(path: &Path) -> io::Result<File> {
    File::options()
        .read(true)
        .append(true)
        .create(true)
        .open(path)
}
