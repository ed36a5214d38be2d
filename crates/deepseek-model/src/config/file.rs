//! Opens files of a checkpoint: regular ones only, and of those read as a whole no more than fits.
//!
//! A pipe would be waited for, and a device such as `/dev/zero` read for ever.

use std::{
    fs::{self, File, FileType},
    io::{self, Read},
    path::{Path, PathBuf},
};

use crate::plain::Shown;

/// Most bytes of `config.json`, `generation_config.json` and the shard index. That of the released
/// model's index, the longest of them, is a few.
pub(crate) const MAX_JSON: u64 = 64 << 20;
/// Most bytes of `tokenizer.json`.
pub(crate) const MAX_TOKENIZER: u64 = 512 << 20;

/// What a file begins with that git-lfs has put in the place of another.
pub(crate) const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// U+FEFF in UTF-8.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// Why a file is refused before it is read. It is the inner error of the [`io::Error`] that a
/// `Read` variant has as its source.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// A directory, pipe, socket or device.
    #[error("expected a regular file, found {found}")]
    NotRegular {
        /// What it is, with its article.
        found: &'static str,
    },
    /// A symbolic link that leads nowhere.
    #[error(
        "expected a file, found a symbolic link to {}, which is not there",
        Shown(target)
    )]
    Dangling {
        /// Where the link leads.
        target: PathBuf,
    },
    /// A file that is read as a whole and is longer than any such file.
    #[error("expected at most {limit} bytes, found more: {bytes}")]
    TooLarge {
        /// Bytes of the file.
        bytes: u64,
        /// Bytes that it may have.
        limit: u64,
    },
    /// What git-lfs puts in the place of a file until that is fetched.
    #[error("a pointer of git-lfs: fetch the file itself (git lfs pull)")]
    Pointer,
    /// A text in UTF-16, which some programs write.
    #[error("expected UTF-8, found UTF-16, by its byte-order mark")]
    Utf16,
}

impl From<FileError> for io::Error {
    fn from(error: FileError) -> Self {
        Self::new(io::ErrorKind::InvalidInput, error)
    }
}

/// Whether there is anything of this name; a link that leads nowhere is something.
pub(crate) fn is_there(path: &Path) -> bool {
    !matches!(fs::symlink_metadata(path), Err(e) if e.kind() == io::ErrorKind::NotFound)
}

/// Opens a regular file, or one that a link leads to.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    // Asked before opening: to open a pipe is to wait for who writes to it.
    let metadata = fs::metadata(path).map_err(|error| match fs::read_link(path) {
        Ok(target) if error.kind() == io::ErrorKind::NotFound => {
            FileError::Dangling { target }.into()
        }
        _ => error,
    })?;
    if !metadata.is_file() {
        let found = kind(metadata.file_type());
        return Err(FileError::NotRegular { found }.into());
    }
    File::open(path)
}

/// All bytes of a regular file of at most `limit`: a text in UTF-8, without the byte-order mark that some
/// programs begin one with and that no parser of JSON takes.
pub(crate) fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let too_large = |bytes| FileError::TooLarge { bytes, limit };
    let bytes = file.metadata()?.len();
    if bytes > limit {
        return Err(too_large(bytes).into());
    }
    // The file may grow while it is read, and some say that they are empty and are not.
    let mut content = Vec::new();
    file.take(limit + 1).read_to_end(&mut content)?;
    if content.len() as u64 > limit {
        return Err(too_large(content.len() as u64).into());
    }
    if content.starts_with(b"\xff\xfe") || content.starts_with(b"\xfe\xff") {
        return Err(FileError::Utf16.into());
    }
    if content.starts_with(POINTER) {
        return Err(FileError::Pointer.into());
    }
    if content.starts_with(BYTE_ORDER_MARK) {
        content.drain(..BYTE_ORDER_MARK.len());
    }
    Ok(content)
}

/// All text of a regular file of at most `limit` bytes.
pub(crate) fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    String::from_utf8(read(path, limit)?)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.utf8_error()))
}

fn kind(file: FileType) -> &'static str {
    if file.is_dir() {
        return "a directory";
    }
    special(file)
}

#[cfg(unix)]
fn special(file: FileType) -> &'static str {
    use std::os::unix::fs::FileTypeExt;
    if file.is_fifo() {
        "a pipe"
    } else if file.is_socket() {
        "a socket"
    } else {
        "a device"
    }
}

#[cfg(not(unix))]
fn special(_file: FileType) -> &'static str {
    "something else"
}
