//! A stand-in for the driver's `libcuda.so.1`, to link programs against on a machine without one.
//!
//! It exports every function of the driver that the toolkit's header or cudarc's bindings mention. A
//! linker needs no more: which functions there are. At run time the driver's own library is loaded.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::shell;

/// Where the stub of a toolkit is.
pub(super) fn path(root: &Path) -> PathBuf {
    root.join("lib/stubs/libcuda.so")
}

/// Compiles the stub.
pub(super) fn build(root: &Path) -> Result<()> {
    let header = root.join("include/cuda.h");
    let mut names = functions(
        &fs::read_to_string(&header)
            .with_context(|| format!("cannot read {}", header.display()))?,
    );
    ensure!(
        names.contains("cuInit"),
        "{} declares no cuInit",
        header.display()
    );
    names.append(&mut functions(&bindings()?));

    let stub = path(root);
    let folder = stub.parent().context("a file has a folder")?;
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let source = folder.join("libcuda.c");
    fs::write(&source, program(&names))
        .with_context(|| format!("cannot write {}", source.display()))?;
    let mut cc = shell::command("cc");
    cc.args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"]);
    // Put in its place whole: an interruption leaves no part of it there.
    let made = folder.join("libcuda.so.made");
    cc.arg(&made).arg(&source);
    shell::run(cc)?;
    fs::rename(&made, &stub).with_context(|| format!("cannot write {}", stub.display()))
}

/// The bindings of the cudarc that the workspace locks.
fn bindings() -> Result<String> {
    let mut metadata = shell::cargo(&["metadata", "--format-version=1", "--all-features"]);
    metadata.args(["--filter-platform", "x86_64-unknown-linux-gnu"]);
    let metadata: serde_json::Value = serde_json::from_str(&shell::read(metadata)?)?;
    let packages = metadata["packages"]
        .as_array()
        .context("cargo metadata lists no packages")?;
    let cudarc = packages.iter().find(|package| package["name"] == "cudarc");
    let manifest = cudarc.and_then(|package| package["manifest_path"].as_str());
    let manifest = Path::new(manifest.context("the workspace does not depend on cudarc")?);
    let file = manifest.with_file_name("src").join("driver/sys/mod.rs");
    fs::read_to_string(&file).with_context(|| format!("no {}", file.display()))
}

/// All words of a text that are names of driver functions: `cu`, then a capital letter.
fn functions(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let functions = words.filter(|word| {
        let rest = word.strip_prefix("cu");
        rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()))
    });
    functions.map(str::to_owned).collect()
}

/// A program in C that defines the functions; each fails with `CUDA_ERROR_STUB_LIBRARY`.
fn program(names: &BTreeSet<String>) -> String {
    let mut program = String::from("/* A stand-in for the driver, for linking. */\n");
    for name in names {
        let _ = writeln!(program, "int {name}(void) {{ return 34; }}");
    }
    program
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_found_in_headers_and_bindings() {
        let header = "#define cuMemAlloc cuMemAlloc_v2\n\
                      CUresult CUDAAPI cuInit(unsigned int Flags);\n\
                      typedef cuuint32_t cu_other; // see cuLaunchKernel()";
        let bindings = "pub fn cuMemAlloc_v2(bytes: usize) -> CUresult;";
        let mut names = functions(header);
        names.append(&mut functions(bindings));
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        assert_eq!(
            names,
            ["cuInit", "cuLaunchKernel", "cuMemAlloc", "cuMemAlloc_v2"]
        );
    }

    #[test]
    fn every_function_is_defined() {
        let names = ["cuA", "cuB"].map(String::from).into();
        let program = program(&names);
        assert!(program.ends_with("int cuA(void) { return 34; }\nint cuB(void) { return 34; }\n"));
    }
}
