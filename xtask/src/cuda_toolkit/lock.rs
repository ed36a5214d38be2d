//! One process at a time in a folder that several may change.

use std::fs::{self, File, TryLockError};
use std::path::Path;

use anyhow::{Context, Result};

/// Waits until no other process holds the lock, and says so if it must. The lock ends with the value,
/// and with the process.
pub(crate) fn lock(file: &Path) -> Result<File> {
    if let Some(parent) = file.parent() {
        fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
    }
    let lock = File::create(file).with_context(|| format!("cannot write {}", file.display()))?;
    match lock.try_lock() {
        Ok(()) => return Ok(lock),
        Err(TryLockError::WouldBlock) => {
            eprintln!(
                "waiting for another process to end: it holds {}",
                file.display()
            );
        }
        Err(TryLockError::Error(error)) => {
            return Err(error).with_context(|| format!("cannot lock {}", file.display()));
        }
    }
    lock.lock()
        .with_context(|| format!("cannot lock {}", file.display()))?;
    Ok(lock)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_second_waits_for_the_first() {
        let folder = std::env::temp_dir().join(format!("lock-{}", std::process::id()));
        let file = folder.join("new/lock");
        let first = lock(&file).unwrap();
        let (sender, receiver) = mpsc::channel();
        let second = std::thread::spawn({
            let file = file.clone();
            move || {
                let _lock = lock(&file).unwrap();
                sender.send(()).unwrap();
            }
        });
        receiver
            .recv_timeout(Duration::from_millis(100))
            .unwrap_err();
        drop(first);
        receiver.recv_timeout(Duration::from_secs(10)).unwrap();
        second.join().unwrap();
        fs::remove_dir_all(&folder).unwrap();
        // The path is named where there can be no file.
        let error = format!("{:#}", lock(Path::new("/dev/null/x/lock")).unwrap_err());
        assert!(error.contains("/dev/null/x"), "{error}");
    }
}
