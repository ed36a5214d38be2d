//! Whether what a wheel unpacked is still there: each wheel brings a list of its files and their sizes.

use std::fs;
use std::path::Path;

use super::wheels::Wheel;

/// What is wrong with the files of a wheel that was unpacked: the first that is missing or has another
/// size. Contents are not read, which would take as long as unpacking them again.
pub(super) fn of(folder: &Path, wheel: &Wheel) -> Option<String> {
    let info = format!(
        "{}-{}.dist-info",
        wheel.name.replace('-', "_"),
        wheel.version
    );
    let record = folder.join(info).join("RECORD");
    let text = match fs::read_to_string(&record) {
        Ok(text) => text,
        Err(error) => return Some(format!("{}: {error}", record.display())),
    };
    let listed = files(&text);
    if listed.is_empty() {
        return Some(format!("{}: lists no file", record.display()));
    }
    listed.into_iter().find_map(|(name, bytes)| {
        let file = folder.join(name);
        match fs::metadata(&file).map(|found| found.len()) {
            Ok(found) if found == bytes => None,
            Ok(found) => Some(format!(
                "{}: expected {bytes} bytes, got {found}",
                file.display()
            )),
            Err(error) => Some(format!("{}: {error}", file.display())),
        }
    })
}

/// Names and sizes in a wheel's list: lines of `name,hash,size`. Of the list itself there is no size.
fn files(record: &str) -> Vec<(&str, u64)> {
    let lines = record.lines();
    let fields = lines.filter_map(|line| {
        let (rest, bytes) = line.rsplit_once(',')?;
        let (name, _) = rest.rsplit_once(',')?;
        Some((name.trim_matches('"'), bytes.trim().parse().ok()?))
    });
    fields.collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::wheels::WHEELS;
    use super::*;

    /// Unpacks a wheel that holds one file, at a path in the folder.
    pub(in super::super) fn unpacked(folder: &Path, wheel: &Wheel, name: &str) {
        let file = folder.join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "12345").unwrap();
        let info = format!(
            "{}-{}.dist-info",
            wheel.name.replace('-', "_"),
            wheel.version
        );
        let record = format!("{name},sha256=x,5\n{info}/RECORD,,\n");
        fs::create_dir_all(folder.join(&info)).unwrap();
        fs::write(folder.join(&info).join("RECORD"), record).unwrap();
    }

    /// An nvcc that lost its contents, or is gone, would fail in the middle of a build.
    #[test]
    fn files_that_are_gone_or_cut_short_are_found() {
        let folder = std::env::temp_dir().join(format!("damage-{}", std::process::id()));
        let wheel = &WHEELS[0];
        let nvcc = folder.join("nvidia/cu13/bin/nvcc");
        unpacked(&folder, wheel, "nvidia/cu13/bin/nvcc");
        assert_eq!(of(&folder, wheel), None);
        fs::write(&nvcc, "").unwrap();
        let damage = of(&folder, wheel).unwrap();
        assert!(
            damage.ends_with("bin/nvcc: expected 5 bytes, got 0"),
            "{damage}"
        );
        fs::remove_file(&nvcc).unwrap();
        let damage = of(&folder, wheel).unwrap();
        assert!(damage.contains("bin/nvcc: No such file"), "{damage}");
        let damage = of(&folder, &WHEELS[1]).unwrap();
        assert!(damage.contains("RECORD: No such file"), "{damage}");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn names_with_commas_are_read() {
        let record = "a/b.h,sha256=x,7\r\n\"a,b.h\",sha256=y,8\r\nRECORD,,\r\n";
        assert_eq!(files(record), [("a/b.h", 7), ("a,b.h", 8)]);
    }
}
