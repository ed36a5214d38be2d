//! What may lie in a checkpoint's directory under the name of a file and is none. Reading a pipe or
//! a device never ends, so all of these are refused before they are opened.

use std::{
    error::Error,
    fs,
    path::{Path, PathBuf},
};

use deepseek_model::{
    Config, Model, ModelOptions,
    config::{ConfigError, FileError},
    tokenizer::Tokenizer,
    weights::{LoadOptions, Weights},
};
use tempfile::TempDir;

const FIXTURE: &str = "tests/data/engram-s1";
const INDEX: &str = "model.safetensors.index.json";

/// The files of JSON that are read whole.
const JSON: [&str; 4] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    INDEX,
];
const SHARD: &str = "model-00002-of-00003.safetensors";

/// A copy of the fixture, of which one file may be something else.
fn copy() -> TempDir {
    let dir = TempDir::new().unwrap();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join(FIXTURE);
    for entry in fs::read_dir(fixture).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    dir
}

/// The error of what reads `file`, with its causes.
fn refusal(dir: &Path, file: &str) -> String {
    let error: Box<dyn Error> = match file {
        "tokenizer.json" => Tokenizer::load(dir).unwrap_err().into(),
        "config.json" | "generation_config.json" => Config::load(dir).unwrap_err().into(),
        _ => {
            let config = Config::load(dir).unwrap();
            let options = LoadOptions {
                device: candle_core::Device::Cpu,
                dtype: candle_core::DType::F32,
            };
            let weights = Weights::load(dir, &config, &options, &|_| {});
            weights.unwrap_err().into()
        }
    };
    assert!(Model::load(dir, ModelOptions::default(), &|_| {}).is_err());
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    let text = causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"));
    text.replace(dir.to_str().unwrap(), "DIR")
}

/// The refusals of every file that is read, once `make` has put something else in its place.
fn refusals(make: impl Fn(&PathBuf)) -> String {
    let files = JSON.into_iter().chain([SHARD]);
    let refusal = |file| {
        let dir = copy();
        let path = dir.path().join(file);
        fs::remove_file(&path).ok();
        make(&path);
        refusal(dir.path(), file)
    };
    files.map(refusal).collect::<Vec<_>>().join("\n")
}

#[test]
fn directories_are_refused() {
    insta::assert_snapshot!(refusals(|path| fs::create_dir(path).unwrap()));
}

#[cfg(unix)]
#[test]
fn pipes_are_refused_and_not_waited_for() {
    insta::assert_snapshot!(refusals(|path| {
        let made = std::process::Command::new("mkfifo").arg(path).status();
        assert!(made.unwrap().success());
    }));
}

#[cfg(unix)]
#[test]
fn sockets_are_refused() {
    insta::assert_snapshot!(refusals(|path| {
        std::os::unix::net::UnixListener::bind(path).unwrap();
    }));
}

#[cfg(unix)]
#[test]
fn links_to_devices_are_refused_and_not_read_for_ever() {
    insta::assert_snapshot!(refusals(|path| {
        std::os::unix::fs::symlink("/dev/zero", path).unwrap();
    }));
}

/// Taken for absent, a link to nowhere would cost a model its stop tokens, or all shards but one.
#[cfg(unix)]
#[test]
fn links_to_nowhere_are_refused() {
    insta::assert_snapshot!(refusals(|path| {
        std::os::unix::fs::symlink("moved-away", path).unwrap();
    }));

    let dir = copy();
    fs::remove_file(dir.path().join(INDEX)).unwrap();
    std::os::unix::fs::symlink("moved-away", dir.path().join("model.safetensors")).unwrap();
    insta::assert_snapshot!(refusal(dir.path(), "model.safetensors"), @r"
    DIR has 1 problem:
      model.safetensors: cannot be read: expected a file, found a symbolic link to moved-away, which is not there
    ");
}

/// As downloads lay files out: what a link leads to is read.
#[cfg(unix)]
#[test]
fn links_to_files_are_read() {
    let (dir, links) = (copy(), TempDir::new().unwrap());
    for entry in fs::read_dir(dir.path()).unwrap() {
        let path = entry.unwrap().path();
        let link = links.path().join(path.file_name().unwrap());
        std::os::unix::fs::symlink(&path, link).unwrap();
    }
    Model::load(links.path(), ModelOptions::default(), &|_| {}).unwrap();
}

/// The files have a length and no content, so that a test takes neither disk nor memory.
#[test]
fn files_too_long_to_be_read_whole_are_refused() {
    for (file, limit) in [
        ("config.json", 64_u64 << 20),
        ("generation_config.json", 64 << 20),
        ("tokenizer.json", 512 << 20),
        (INDEX, 64 << 20),
    ] {
        let dir = copy();
        let path = dir.path().join(file);
        fs::remove_file(&path).ok();
        fs::File::create(&path).unwrap().set_len(limit + 1).unwrap();
        let expected = format!(
            "cannot read DIR/{file}: expected at most {limit} bytes, found more: {}",
            limit + 1
        );
        assert_eq!(refusal(dir.path(), file), expected);
    }
}

/// Editors of some systems begin a text with a mark that no parser of JSON takes, and that nobody sees.
#[test]
fn a_byte_order_mark_is_passed_over_and_utf_16_is_named() {
    let files = ["config.json", "tokenizer.json", INDEX];
    let dir = copy();
    fs::write(dir.path().join("generation_config.json"), "\u{feff}{}").unwrap();
    for file in files {
        let path = dir.path().join(file);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, format!("\u{feff}{text}")).unwrap();
    }
    Model::load(dir.path(), ModelOptions::default(), &|_| {}).unwrap();
    Tokenizer::load(dir.path()).unwrap();

    for file in JSON {
        let dir = copy();
        fs::write(dir.path().join(file), b"\xff\xfe{\0}\0").unwrap();
        let expected =
            format!("cannot read DIR/{file}: expected UTF-8, found UTF-16, by its byte-order mark");
        assert_eq!(refusal(dir.path(), file), expected);
    }
}

/// A clone without git-lfs has such a text in the place of each large file.
#[test]
fn a_pointer_of_git_lfs_is_named() {
    for file in JSON {
        let dir = copy();
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n";
        fs::write(dir.path().join(file), pointer).unwrap();
        let expected = format!(
            "cannot read DIR/{file}: a pointer of git-lfs: fetch the file itself (git lfs pull)"
        );
        assert_eq!(refusal(dir.path(), file), expected);
    }
}

/// A program that handles one kind apart finds it below the system's error.
#[test]
fn the_kind_of_refusal_can_be_matched_on() {
    let dir = copy();
    let path = dir.path().join("config.json");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let ConfigError::Read { source, .. } = Config::load(dir.path()).unwrap_err() else {
        panic!("expected that the file cannot be read");
    };
    let inner = source.get_ref().and_then(|error| error.downcast_ref());
    let expected = FileError::NotRegular {
        found: "a directory",
    };
    assert_eq!(inner, Some(&expected));
}

/// A name can hold what clears a terminal or forges a line.
#[cfg(unix)]
#[test]
fn control_characters_of_a_directory_are_escaped() {
    let (from, outer) = (copy(), TempDir::new().unwrap());
    let dir = outer.path().join("a\u{1b}[2Jb\nc\u{202e}d");
    fs::rename(from.path(), &dir).unwrap();
    for file in ["config.json", "tokenizer.json", INDEX] {
        let path = dir.join(file);
        let whole = fs::read(&path).unwrap();
        fs::write(&path, "{").unwrap();
        let text = refusal(&dir, file);
        assert!(text.contains(r"a\u{1b}[2Jb\nc\u{202e}d"), "{text}");
        assert!(!text.contains(|c: char| c.is_control()), "{text:?}");
        fs::write(path, whole).unwrap();
    }
}
