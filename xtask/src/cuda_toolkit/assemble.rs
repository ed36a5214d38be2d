//! Puts a toolkit together from wheels.
//!
//! Resumable at every point: a wheel that was fetched whole is not fetched again, one that was
//! unpacked is marked so, and links and the stub are made anew each time something was unpacked.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use super::wheels::{WHEELS, Wheel};
use super::{Purpose, stub};
use crate::shell;

/// The root of the toolkit in its folder: where the wheels unpack to.
pub(super) fn root(folder: &Path) -> PathBuf {
    folder.join("nvidia/cu13")
}

/// The wheels that are not there yet.
pub(super) fn missing(folder: &Path, purpose: Purpose) -> Vec<Wheel> {
    let needed = WHEELS.into_iter().filter(|wheel| wheel.purpose <= purpose);
    needed
        .filter(|wheel| !mark(folder, wheel).is_file())
        .collect()
}

/// Fetches and unpacks what is missing.
pub(super) fn assemble(folder: &Path, purpose: Purpose) -> Result<()> {
    let missing = missing(folder, purpose);
    if missing.is_empty() && stub::path(&root(folder)).is_file() {
        return Ok(());
    }
    ensure!(
        cfg!(all(target_os = "linux", target_arch = "x86_64")),
        "the wheels are for Linux on x86-64: on this machine, install the CUDA toolkit"
    );
    fs::create_dir_all(folder)?;
    for (i, wheel) in missing.iter().enumerate() {
        let begun = Instant::now();
        eprintln!("[{}/{}] {wheel}", i + 1, missing.len());
        let file = fetch(folder, wheel).with_context(|| format!("cannot fetch {wheel}"))?;
        unpack(folder, &file).with_context(|| format!("cannot unpack {}", file.display()))?;
        fs::write(mark(folder, wheel), wheel.sha256)?;
        fs::remove_dir_all(downloads(folder, wheel))?;
        eprintln!(
            "[{}/{}] unpacked, {}",
            i + 1,
            missing.len(),
            shell::time(begun.elapsed())
        );
    }
    let root = root(folder);
    make_executable(&root.join("bin"))?;
    make_executable(&root.join("nvvm/bin"))?;
    link_libraries(&root)?;
    stub::build(&root)
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
    fs::create_dir_all(&downloads)?;
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
    )?;

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
    pip.args(["--disable-pip-version-check", "--dest"])
        .arg(&downloads);
    pip.arg("--requirement").arg(&requirements);
    // Standard output is for the environment.
    pip.stdout(std::io::stderr());
    shell::run(pip)?;

    let files = fs::read_dir(&downloads)?.map(|entry| Ok(entry?.path()));
    let files: Vec<PathBuf> = files.collect::<Result<_>>()?;
    let wheel = files
        .into_iter()
        .find(|file| file.extension().is_some_and(|e| e == "whl"));
    wheel.context("pip fetched no wheel")
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

/// Zip files of this kind do not say which files are programs.
fn make_executable(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("no {}", folder.display()))? {
        let path = entry?.path();
        if path.is_file() {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        }
    }
    Ok(())
}

/// Gives each `lib/libX.so.N` the name that a linker looks for, and the folder its other name.
fn link_libraries(root: &Path) -> Result<()> {
    let lib = root.join("lib");
    fs::create_dir_all(&lib)?;
    for entry in fs::read_dir(&lib)? {
        let name = entry?.file_name();
        let name = name.to_string_lossy();
        if let Some((stem, _)) = name.split_once(".so.") {
            link(&name, &lib.join(format!("{stem}.so")))?;
        }
    }
    link("lib", &root.join("lib64"))
}

/// A symbolic link, in place of one that is there.
fn link(to: &str, at: &Path) -> Result<()> {
    match fs::remove_file(at) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            bail!("cannot replace {}: {error}", at.display())
        }
        _ => {}
    }
    symlink(to, at).with_context(|| format!("cannot link {}", at.display()))
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
        let all = missing(&scratch.0, Purpose::Build);
        assert_eq!(all, WHEELS);
        let check = missing(&scratch.0, Purpose::Check);
        assert!(check.len() < all.len() && check.iter().all(|w| w.purpose == Purpose::Check));
        fs::write(mark(&scratch.0, &check[0]), "").unwrap();
        assert_eq!(missing(&scratch.0, Purpose::Check), check[1..]);
    }

    #[test]
    fn libraries_get_the_names_that_linkers_look_for() {
        let scratch = Scratch::new("links");
        let lib = scratch.0.join("lib");
        fs::create_dir_all(&lib).unwrap();
        fs::write(lib.join("libcublas.so.13"), "x").unwrap();
        fs::write(lib.join("libcudart_static.a"), "x").unwrap();
        for _ in 0..2 {
            link_libraries(&scratch.0).unwrap();
        }
        assert_eq!(
            fs::read_link(lib.join("libcublas.so")).unwrap(),
            Path::new("libcublas.so.13")
        );
        assert_eq!(
            fs::read(scratch.0.join("lib64/libcublas.so")).unwrap(),
            b"x"
        );
        assert_eq!(fs::read_dir(&lib).unwrap().count(), 3);
    }
}
