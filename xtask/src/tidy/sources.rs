//! Rules on Rust source files.

use std::path::Path;

use anyhow::Result;

use super::{Report, code::code_only, files, read};

/// The only files that may hold `unsafe`, each small and with a reason at the block.
const UNSAFE: &[&str] = &[
    // Questions to the driver that cudarc leaves unsafe.
    "crates/deepseek-model/src/device/cuda.rs",
    // The `gemm` crate's one entry point takes pointers and strides.
    "crates/deepseek-model/src/ops/gemm.rs",
    // Launches of the decoder's kernels, with checked arguments.
    "crates/deepseek-model/src/ops/cuda/attention.rs",
    "crates/deepseek-model/src/ops/cuda/compress.rs",
    "crates/deepseek-model/src/ops/cuda/engram.rs",
    "crates/deepseek-model/src/ops/cuda/experts.rs",
    "crates/deepseek-model/src/ops/cuda/experts/hopper.rs",
    "crates/deepseek-model/src/ops/cuda/ffn.rs",
    "crates/deepseek-model/src/ops/cuda/index.rs",
    "crates/deepseek-model/src/ops/cuda/launch.rs",
    "crates/deepseek-model/src/ops/cuda/linear.rs",
    "crates/deepseek-model/src/ops/cuda/mhc.rs",
    "crates/deepseek-model/src/ops/cuda/mix_tiles.rs",
    "crates/deepseek-model/src/ops/cuda/norm.rs",
    "crates/deepseek-model/src/ops/cuda/rope.rs",
    "crates/deepseek-model/src/ops/cuda/route.rs",
    // One call of cuBLAS, with checked lengths.
    "crates/deepseek-model/src/ops/cuda/grouped.rs",
    // A memory-mapped file can be changed by another process.
    "crates/deepseek-model/src/weights/mapping.rs",
    // One option of glibc's allocator, which the standard library has no name for.
    "examples/src/arenas.rs",
    // Launches of kernels, with checked arguments.
    "crates/replay-cuda/src/cuda/raw/args.rs",
    "crates/replay-cuda/src/cuda/raw/launch.rs",
    "crates/replay-cuda/src/cuda/raw/replay_rows.rs",
    "crates/replay-cuda/src/cuda/raw/row_copy.rs",
    "crates/replay-cuda/benches/gpu_rows/main.rs",
    // Driver calls that cudarc does not wrap.
    "crates/replay-graph/src/cuda/frontier.rs",
    "crates/replay-graph/src/cuda/raw.rs",
    // Tests that count driver calls and keep streams busy.
    "crates/replay-graph/tests/gpu/launches.rs",
    "crates/replay-graph/tests/gpu/streams.rs",
    // Tests that set up a device and count a graph's nodes.
    "crates/replay-cuda/tests/gpu/gpu.rs",
    "crates/replay-cuda/tests/gpu/hazards.rs",
    // An allocator that counts, for the test that planning does not allocate.
    "crates/replay-core/tests/allocations.rs",
];

/// Crate roots that must forbid `unsafe` themselves, so that the compiler holds the rule as well.
const FORBID: &[&str] = &["crates/replay-core/src/lib.rs"];

/// Lines of a file from which on one should ask what the second idea in it is.
const LONG: usize = 400;
/// Lines that no file may exceed.
const TOO_LONG: usize = 600;

pub(super) fn check(root: &Path, report: &mut Report) -> Result<()> {
    for file in files(root, Path::new(""), "rs")? {
        let text = read(root, &file)?;
        check_file(&file.to_string_lossy(), &text, report);
    }
    for file in UNSAFE {
        let text = read(root, Path::new(file))?;
        if word(&code_only(&text), "unsafe").is_none() {
            report.error(format!(
                "{file}: has no `unsafe` any more: take it off the list in {}",
                file!()
            ));
        }
    }
    for file in FORBID {
        if !read(root, Path::new(file))?.contains("#![forbid(unsafe_code)]") {
            report.error(format!("{file}: #![forbid(unsafe_code)] is missing"));
        }
    }
    Ok(())
}

fn check_file(file: &str, text: &str, report: &mut Report) {
    if !text.starts_with("//!") {
        report.error(format!(
            "{file}:1: the first line must say what the file is for (`//! ...`)"
        ));
    }
    match text.lines().count() {
        n if n > TOO_LONG => report.error(format!("{file}: {n} lines, at most {TOO_LONG} allowed")),
        n if n > LONG => report.warn(format!("{file}: {n} lines, what is its second idea?")),
        _ => {}
    }

    let code = code_only(text);
    let line_of = |at: usize| text[..at].matches('\n').count() + 1;
    for name in ["todo", "unimplemented", "dbg"] {
        if let Some(at) = word(&code, name).filter(|at| code[at + name.len()..].starts_with('!')) {
            report.error(format!(
                "{file}:{}: `{name}!` is not for keeps",
                line_of(at)
            ));
        }
    }
    if let Some(at) = code.find("#[ignore") {
        report.error(format!(
            "{file}:{}: an ignored test is one that nobody runs: gate it by a feature",
            line_of(at)
        ));
    }
    if let Some(at) = word(&code, "unsafe").filter(|_| !UNSAFE.contains(&file)) {
        report.error(format!(
            "{file}:{}: `unsafe` outside the files that are listed for it",
            line_of(at)
        ));
    }
    for (at, _) in text.match_indices("feature = \"cuda\"") {
        let line = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
        let is_code = code[at..].starts_with("feature");
        if is_code && code[line..].starts_with([' ', '\t']) {
            report.error(format!(
                "{file}:{}: cfg on the cuda feature stands on modules, not inside items",
                line_of(at)
            ));
        }
    }
}

/// Where `word` first stands in `code` by itself.
fn word(code: &str, word: &str) -> Option<usize> {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    let mut places = code.match_indices(word).map(|(at, _)| at);
    places.find(|&at| !code[..at].ends_with(part) && !code[at + word.len()..].starts_with(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(file: &str, text: &str) -> Vec<String> {
        let mut report = Report::default();
        check_file(file, text, &mut report);
        report.errors
    }

    #[test]
    fn a_clean_file_passes() {
        let text = "//! About.\n// unsafe, todo!()\nconst A: &str = \"unsafe #[ignore] dbg!(\";\n\
                    #![forbid(unsafe_code)]\n#[cfg(feature = \"cuda\")]\nmod gpu;\n";
        assert_eq!(errors("a.rs", text), [""; 0]);
    }

    #[test]
    fn each_broken_rule_is_reported_with_its_line() {
        for (text, expected) in [
            ("use a;\n", "a.rs:1: the first line must say"),
            ("//! A.\n\nfn f() { todo!() }", "a.rs:3: `todo!`"),
            (
                "//! A.\nfn f() { unimplemented!() }",
                "a.rs:2: `unimplemented!`",
            ),
            ("//! A.\nfn f() { dbg!(1) }", "a.rs:2: `dbg!`"),
            ("//! A.\n#[ignore = \"slow\"]\n", "a.rs:2: an ignored test"),
            ("//! A.\nunsafe fn f() {}", "a.rs:2: `unsafe` outside"),
            (
                "//! A.\nfn f() {\n    #[cfg(feature = \"cuda\")]\n    g();\n}",
                "a.rs:3: cfg on the cuda feature",
            ),
        ] {
            let found = errors("a.rs", text);
            assert_eq!(found.len(), 1, "{text}: {found:?}");
            assert!(found[0].starts_with(expected), "{text}: {found:?}");
        }
    }

    #[test]
    fn unsafe_is_allowed_where_it_is_listed() {
        assert_eq!(errors(UNSAFE[0], "//! A.\nunsafe fn f() {}"), [""; 0]);
    }

    #[test]
    fn length_is_warned_of_and_then_refused() {
        let mut report = Report::default();
        check_file("a.rs", &format!("//! A.{}", "\n".repeat(500)), &mut report);
        assert_eq!((report.warnings.len(), report.errors.len()), (1, 0));
        check_file("a.rs", &format!("//! A.{}", "\n".repeat(601)), &mut report);
        assert_eq!((report.warnings.len(), report.errors.len()), (1, 1));
    }
}
