//! Puts a toolkit together from wheels.
//!
//! Resumable at every point: a wheel that was fetched whole is not fetched again, one that was
//! unpacked is marked so, and what is to be made of them is made whenever it is not there. A wheel
//! whose files were damaged later is fetched again.

use std::io::ErrorKind;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use std::{fmt, fs};

use anyhow::{Context, Result, bail, ensure};

use super::wheels::{WHEELS, Wheel};
use super::{Purpose, damage, lock, stub};
use crate::shell;

/// The root of the toolkit in its folder: where the wheels unpack to.
pub(super) fn root(folder: &Path) -> PathBuf {
    folder.join("nvidia/cu13")
}

/// A wheel that must be fetched.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Missing {
    wheel: Wheel,
    /// What is wrong with its files, if it was unpacked before.
    damage: Option<String>,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.damage {
            None => self.wheel.fmt(f),
            Some(damage) => write!(f, "{}, again, for it is damaged: {damage}", self.wheel),
        }
    }
}

/// The wheels that are not there yet, or not whole any more.
pub(super) fn missing(folder: &Path, purpose: Purpose) -> Vec<Missing> {
    let needed = WHEELS.into_iter().filter(|wheel| wheel.purpose <= purpose);
    let missing = needed.filter_map(|wheel| {
        let damage = if mark(folder, &wheel).is_file() {
            Some(damage::of(folder, &wheel)?)
        } else {
            None
        };
        Some(Missing { wheel, damage })
    });
    missing.collect()
}

/// What is to be made of the unpacked wheels yet: programs, links, the stub.
pub(super) fn unfinished(root: &Path) -> Vec<String> {
    let is_program = |file: &PathBuf| {
        fs::metadata(file).is_ok_and(|found| found.permissions().mode() & 0o111 == 0o111)
    };
    let programs = PROGRAMS.map(|folder| root.join(folder));
    let files = programs.iter().flat_map(|folder| files(folder));
    let mut unfinished: Vec<String> = files
        .filter(|file| !is_program(file))
        .map(|file| format!("{} a program", file.display()))
        .collect();
    for (at, to) in links(root) {
        if fs::read_link(&at).ok().as_deref() != Some(Path::new(&to)) {
            unfinished.push(format!("{}, a link to {to}", at.display()));
        }
    }
    let stub = stub::path(root);
    if fs::metadata(&stub).map_or(0, |found| found.len()) == 0 {
        unfinished.push(stub.display().to_string());
    }
    unfinished
}

/// Fetches and unpacks what is missing.
pub(super) fn assemble(folder: &Path, purpose: Purpose) -> Result<()> {
    let root = root(folder);
    if missing(folder, purpose).is_empty() && unfinished(&root).is_empty() {
        return Ok(());
    }
    ensure!(
        cfg!(all(target_os = "linux", target_arch = "x86_64")),
        "the wheels are for Linux on x86-64: on this machine, install the CUDA toolkit"
    );
    let _lock = lock::lock(&folder.join("lock"))?;
    // Another process may have done it all by now.
    let missing = missing(folder, purpose);
    if !missing.is_empty() {
        ensure!(
            has_pip(),
            "pip is what fetches the toolkit, and `python3 -m pip` does not run: {}",
            shell::install("pip")
        );
    }
    for (i, part) in missing.iter().enumerate() {
        let begun = Instant::now();
        let wheel = &part.wheel;
        eprintln!("[{}/{}] {part}", i + 1, missing.len());
        let mark = mark(folder, wheel);
        remove(&mark)?;
        let file = fetch(folder, wheel).with_context(|| format!("cannot fetch {wheel}"))?;
        unpack(folder, &file).with_context(|| format!("cannot unpack {}", file.display()))?;
        if let Some(damage) = damage::of(folder, wheel) {
            bail!(
                "{wheel} does not unpack to what it lists: {damage}; delete {} and run this again",
                folder.display()
            );
        }
        fs::write(&mark, wheel.sha256)
            .with_context(|| format!("cannot write {}", mark.display()))?;
        let downloads = downloads(folder, wheel);
        fs::remove_dir_all(&downloads)
            .with_context(|| format!("cannot remove {}", downloads.display()))?;
        eprintln!(
            "[{}/{}] unpacked, {}",
            i + 1,
            missing.len(),
            shell::time(begun.elapsed())
        );
    }
    finish(&root)?;
    if !missing.is_empty() || fs::metadata(stub::path(&root)).map_or(0, |found| found.len()) == 0 {
        stub::build(&root)?;
    }
    Ok(())
}

/// The folders whose files are programs. Zip files of this kind do not say so.
const PROGRAMS: [&str; 2] = ["bin", "nvvm/bin"];

/// Makes programs of the programs, and the links.
fn finish(root: &Path) -> Result<()> {
    for file in PROGRAMS.iter().flat_map(|folder| files(&root.join(folder))) {
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755))
            .with_context(|| format!("cannot make {} a program", file.display()))?;
    }
    for (at, to) in links(root) {
        // One that is right stays: another process may be reading it.
        if fs::read_link(&at).ok().as_deref() != Some(Path::new(&to)) {
            remove(&at)?;
            symlink(&to, &at).with_context(|| format!("cannot link {}", at.display()))?;
        }
    }
    Ok(())
}

/// The links that are needed, and what each leads to: each `lib/libX.so.N` by the name that a linker
/// looks for, and the folder by its other name.
fn links(root: &Path) -> Vec<(PathBuf, String)> {
    let lib = root.join("lib");
    let mut links = Vec::new();
    for file in files(&lib) {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        if let Some((stem, _)) = name.split_once(".so.") {
            links.push((lib.join(format!("{stem}.so")), name.clone().into_owned()));
        }
    }
    links.push((root.join("lib64"), "lib".into()));
    links
}

/// The files of a folder, in order; none if there is no such folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<_> = entries
        .map(|entry| entry.path())
        .filter(|path| path.is_file())
        .collect();
    files.sort();
    files
}

/// Removes a file that may be there.
fn remove(file: &Path) -> Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", file.display()))
        }
        _ => Ok(()),
    }
}

/// Says that a wheel has been unpacked.
fn mark(folder: &Path, wheel: &Wheel) -> PathBuf {
    folder.join(format!("{}-{}.unpacked", wheel.name, wheel.version))
}

fn downloads(folder: &Path, wheel: &Wheel) -> PathBuf {
    folder.join("downloads").join(wheel.name)
}

/// Fetches one wheel with pip, which takes its index, proxy and certificates from its own
/// configuration, shows progress, checks the hash, and leaves a file alone that is there and right.
fn fetch(folder: &Path, wheel: &Wheel) -> Result<PathBuf> {
    let downloads = downloads(folder, wheel);
    fs::create_dir_all(&downloads)
        .with_context(|| format!("cannot make {}", downloads.display()))?;
    let requirements = downloads.join("requirements.txt");
    let Wheel {
        name,
        version,
        sha256,
        ..
    } = wheel;
    fs::write(
        &requirements,
        format!("{name}=={version} --hash=sha256:{sha256}\n"),
    )
    .with_context(|| format!("cannot write {}", requirements.display()))?;

    let mut pip = python();
    pip.args([
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
    ]);
    // An index that does not answer at once is common enough on shared machines.
    pip.args(["--retries=10", "--timeout=60"]);
    pip.args(["--disable-pip-version-check", "--no-cache-dir", "--dest"])
        .arg(&downloads);
    pip.arg("--requirement").arg(&requirements);
    // Standard output is for the environment.
    pip.stdout(std::io::stderr());
    shell::run(pip)?;

    let mut wheels = files(&downloads);
    wheels.retain(|file| file.extension().is_some_and(|e| e == "whl"));
    verified(&wheels, sha256)
}

/// The file that has the checksum. pip has found it so; others may lie beside it, of earlier runs.
fn verified(files: &[PathBuf], sha256: &str) -> Result<PathBuf> {
    let script = "import hashlib, sys\n\
                  digest = hashlib.sha256()\n\
                  with open(sys.argv[1], 'rb') as file:\n    \
                      while block := file.read(1 << 20):\n        \
                          digest.update(block)\n\
                  print(digest.hexdigest())";
    for file in files {
        let mut digest = python();
        digest.args(["-c", script]).arg(file);
        if shell::read(digest)?.trim() == sha256 {
            return Ok(file.clone());
        }
    }
    bail!("pip fetched no file with the checksum {sha256}: it left {files:?}")
}

/// Whether pip runs.
fn has_pip() -> bool {
    let mut pip = python();
    pip.args(["-m", "pip", "--version"]);
    pip.output().is_ok_and(|output| output.status.success())
}

/// Unpacks a wheel, which is a zip file.
fn unpack(folder: &Path, file: &Path) -> Result<()> {
    let mut unzip = python();
    unzip
        .args(["-m", "zipfile", "--extract"])
        .arg(file)
        .arg(folder);
    shell::run(unzip)
}

fn python() -> Command {
    shell::command("python3")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of its own, removed with everything in it when dropped.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("xtask-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn what_is_unpacked_is_not_missing() {
        let scratch = Scratch::new("missing");
        let wheels = |purpose| {
            let missing = missing(&scratch.0, purpose);
            missing.iter().map(|m| m.wheel).collect::<Vec<_>>()
        };
        let all = wheels(Purpose::Build);
        assert_eq!(all, WHEELS);
        let check = wheels(Purpose::Check);
        assert!(check.len() < all.len() && check.iter().all(|w| w.purpose == Purpose::Check));
        damage::tests::unpacked(&scratch.0, &check[0], "bin/nvcc");
        // It may be a part of it, as long as there is no mark.
        assert_eq!(wheels(Purpose::Check), check);
        fs::write(mark(&scratch.0, &check[0]), "").unwrap();
        assert_eq!(wheels(Purpose::Check), check[1..]);
        fs::write(scratch.0.join("bin/nvcc"), "").unwrap();
        let damaged = &missing(&scratch.0, Purpose::Check)[0];
        let shown = damaged.to_string();
        assert!(
            shown.contains("again, for it is damaged") && shown.contains("got 0"),
            "{shown}"
        );
    }

    /// An interruption after the last wheel leaves all marks and no links.
    #[test]
    fn what_is_not_finished_is_found_and_made() {
        let scratch = Scratch::new("links");
        let lib = scratch.0.join("lib");
        for (file, text) in [
            ("lib/libcublas.so.13", "x"),
            ("lib/libcudart_static.a", "x"),
            ("bin/nvcc", "x"),
            ("lib/stubs/libcuda.so", ""),
        ] {
            let file = scratch.0.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        symlink("libcublas.so.12", lib.join("libcublas.so")).unwrap();
        let found = unfinished(&scratch.0).join("\n");
        for part in ["bin/nvcc", "libcublas.so,", "lib64,", "stubs/libcuda.so"] {
            assert!(found.contains(part), "{part}: {found}");
        }
        for _ in 0..2 {
            finish(&scratch.0).unwrap();
        }
        assert_eq!(
            fs::read_link(lib.join("libcublas.so")).unwrap(),
            Path::new("libcublas.so.13")
        );
        assert_eq!(
            fs::read(scratch.0.join("lib64/libcublas.so")).unwrap(),
            b"x"
        );
        let left = unfinished(&scratch.0);
        assert!(
            left.len() == 1 && left[0].ends_with("stubs/libcuda.so"),
            "{left:?}"
        );
    }

    /// A wheel of an earlier run, of another version, must not be taken for the one that was checked.
    #[test]
    fn only_the_file_with_the_checksum_is_unpacked() {
        let scratch = Scratch::new("checksum");
        let [other, right] = ["a.whl", "b.whl"].map(|name| scratch.0.join(name));
        fs::write(&other, "other").unwrap();
        fs::write(&right, "abc").unwrap();
        let sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let found = verified(&[other.clone(), right.clone()], sha256).unwrap();
        assert_eq!(found, right);
        let error = verified(&[other], sha256).unwrap_err().to_string();
        assert!(error.contains("a.whl") && error.contains(sha256), "{error}");
    }
}
