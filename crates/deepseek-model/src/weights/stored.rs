//! A stored matrix: its values as the checkpoint encodes them, decoded row by row.

use std::path::PathBuf;

use safetensors::Dtype;

use super::{
    formats::{self, E8M0_NAN, Element, GROUP, Plain},
    manifest::Part,
    problem::Problem,
    shard::RawTensor,
};
use crate::config::ExpertDtype;

const PLAIN: &str = "F32, BF16 or F16";
const QUANTISABLE: &str = "F32, BF16, F16, F8_E4M3, I8, U8 or F4";
const SCALES: &str = "F8_E8M0, U8, F32, BF16 or F16";

/// A matrix `[rows, columns]` (a vector is one row) in a shard.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub(super) name: String,
    pub(super) rows: usize,
    pub(super) columns: usize,
    raw: RawTensor,
    encoding: Encoding,
}

#[derive(Debug, Clone)]
enum Encoding {
    Plain(Plain),
    /// E4M3, with a scale per this many rows and [`GROUP`] columns.
    Fp8 {
        scales: Scales,
        rows_per_scale: usize,
    },
    /// E2M1, two in a byte, with a scale per row and [`GROUP`] columns.
    Fp4 {
        scales: Scales,
    },
}

/// A matrix of scales, `per_row` of them in a row.
#[derive(Debug, Clone)]
struct Scales {
    raw: RawTensor,
    format: ScaleFormat,
    per_row: usize,
}

#[derive(Debug, Clone, Copy)]
enum ScaleFormat {
    E8m0,
    Plain(Plain),
}

impl Stored {
    /// Checks that `part` is stored as `raw` with the scales `scale` (and no others).
    pub(super) fn new(
        part: &Part,
        raw: &RawTensor,
        scale: Option<&RawTensor>,
    ) -> Result<Self, Problem> {
        let columns = part.shape.last().copied().unwrap_or(1);
        let rows = part.shape.iter().rev().skip(1).product();
        let encoding = encoding(part, (rows, columns), raw, scale)?;
        Ok(Self {
            name: part.name.clone(),
            rows,
            columns,
            raw: raw.clone(),
            encoding,
        })
    }

    /// Decodes one row, `columns` values.
    pub(super) fn decode_row<T: Element>(&self, row: usize, out: &mut [T]) {
        let bytes = self.raw.bytes();
        match &self.encoding {
            Encoding::Plain(plain) => {
                let width = self.columns * plain.size();
                plain.decode(&bytes[row * width..][..width], out);
            }
            Encoding::Fp8 {
                scales,
                rows_per_scale,
            } => {
                let bytes = &bytes[row * self.columns..][..self.columns];
                formats::fp8_row(bytes, scales.row(row / rows_per_scale), out);
            }
            Encoding::Fp4 { scales } => {
                let width = self.columns / 2;
                formats::fp4_row(&bytes[row * width..][..width], scales.row(row), out);
            }
        }
    }

    /// Bytes in the file, scales included.
    pub(super) fn bytes(&self) -> usize {
        self.raw.bytes().len() + self.scales().map_or(0, |scales| scales.raw.bytes().len())
    }

    /// Whether all scales of a row are finite.
    pub(super) fn row_scales_are_finite(&self, row: usize) -> bool {
        match &self.encoding {
            Encoding::Plain(_) => true,
            Encoding::Fp8 {
                scales,
                rows_per_scale,
            } => scales.row(row / rows_per_scale).all(f32::is_finite),
            Encoding::Fp4 { scales } => scales.row(row).all(f32::is_finite),
        }
    }

    /// Reads all scales and says which are not finite: with one, every value of a tile would be NaN.
    pub(super) fn check_scales(&self) -> Option<Problem> {
        let scales = self.scales()?;
        if matches!(scales.format, ScaleFormat::E8m0) && !scales.raw.bytes().contains(&E8M0_NAN) {
            return None;
        }
        let rows = scales.raw.shape[0];
        let all = (0..rows).flat_map(|row| scales.row(row));
        let mut bad = all
            .enumerate()
            .filter(|(_, scale)| !scale.is_finite())
            .map(|(at, _)| at);
        let first = bad.next()?;
        Some(Problem::BadScale {
            tensor: scale_name(&self.name),
            file: scales.raw.file(),
            count: 1 + bad.count(),
            first: [first / scales.per_row, first % scales.per_row],
        })
    }

    /// The name by which a configuration would say how it is stored.
    pub(super) fn stored_as(&self) -> ExpertDtype {
        match &self.encoding {
            Encoding::Plain(_) => ExpertDtype::Bf16,
            Encoding::Fp8 { .. } => ExpertDtype::Fp8,
            Encoding::Fp4 { .. } => ExpertDtype::Fp4,
        }
    }

    /// Says that it is not stored as `said`, and no other expert is.
    pub(super) fn not_stored_as(&self, said: ExpertDtype) -> Problem {
        Problem::ExpertDtype {
            tensor: self.name.clone(),
            file: self.raw.file(),
            expected: said,
            found: self.stored_as(),
            dtype: self.raw.dtype,
        }
    }

    /// Says that the value at `[row, column]` is not finite.
    pub(super) fn not_finite(&self, first: [usize; 2]) -> Problem {
        Problem::NotFinite {
            tensor: self.name.clone(),
            file: self.raw.file(),
            first,
        }
    }

    /// The file of the values.
    pub(super) fn path(&self) -> PathBuf {
        self.raw.path()
    }

    /// The file of the scales, or of the values of a matrix without.
    pub(super) fn scale_path(&self) -> PathBuf {
        self.scales().map_or(&self.raw, |scales| &scales.raw).path()
    }

    /// Tells the system that rows will be read here and there.
    pub(super) fn expect_scattered_reads(&self) {
        self.raw.expect_scattered_reads();
        if let Some(scales) = self.scales() {
            scales.raw.expect_scattered_reads();
        }
    }

    fn scales(&self) -> Option<&Scales> {
        match &self.encoding {
            Encoding::Plain(_) => None,
            Encoding::Fp8 { scales, .. } | Encoding::Fp4 { scales } => Some(scales),
        }
    }
}

/// The name of the scales of a matrix.
pub(super) fn scale_name(matrix: &str) -> String {
    format!("{}.scale", matrix.strip_suffix(".weight").unwrap_or(matrix))
}

fn encoding(
    part: &Part,
    (rows, columns): (usize, usize),
    raw: &RawTensor,
    scale: Option<&RawTensor>,
) -> Result<Encoding, Problem> {
    let tensor = || part.name.clone();
    if let Some(plain) = Plain::of(raw.dtype) {
        shaped(&part.name, raw, &part.shape)?;
        let unscaled = Problem::Scale {
            tensor: tensor(),
            file: raw.file(),
            dtype: raw.dtype,
            found: true,
        };
        return if scale.is_some() {
            Err(unscaled)
        } else {
            Ok(Encoding::Plain(plain))
        };
    }
    let packed = match raw.dtype {
        Dtype::F8_E4M3 if part.quantisable => false,
        Dtype::I8 | Dtype::U8 | Dtype::F4 if part.quantisable => true,
        found => {
            let expected = if part.quantisable { QUANTISABLE } else { PLAIN };
            return Err(Problem::Dtype {
                tensor: tensor(),
                file: raw.file(),
                expected,
                found,
            });
        }
    };
    if packed && !columns.is_multiple_of(2) {
        return Err(Problem::OddColumns {
            tensor: tensor(),
            file: raw.file(),
            columns,
        });
    }
    // The F4 dtype counts values, the integer dtypes bytes.
    let stored = if packed && raw.dtype != Dtype::F4 {
        columns / 2
    } else {
        columns
    };
    shaped(&part.name, raw, &[rows, stored])?;
    let Some(scale) = scale else {
        return Err(Problem::Scale {
            tensor: tensor(),
            file: raw.file(),
            dtype: raw.dtype,
            found: false,
        });
    };
    scaled(part, (rows, columns), packed, scale)
}

/// Whether 8-bit scales belong to tiles or to rows is told by their shape; the two coincide only
/// where they mean the same.
fn scaled(
    part: &Part,
    (rows, columns): (usize, usize),
    packed: bool,
    scale: &RawTensor,
) -> Result<Encoding, Problem> {
    let name = scale_name(&part.name);
    let format = match (scale.dtype, Plain::of(scale.dtype)) {
        (_, Some(plain)) => ScaleFormat::Plain(plain),
        (Dtype::F8_E8M0 | Dtype::U8, None) => ScaleFormat::E8m0,
        (found, None) => {
            return Err(Problem::Dtype {
                tensor: name,
                file: scale.file(),
                expected: SCALES,
                found,
            });
        }
    };
    let per_row = columns.div_ceil(GROUP);
    let scales = Scales {
        raw: scale.clone(),
        format,
        per_row,
    };
    if packed {
        shaped(&name, scale, &[rows, per_row])?;
        return Ok(Encoding::Fp4 { scales });
    }
    if scale.shape == [rows, per_row] {
        return Ok(Encoding::Fp8 {
            scales,
            rows_per_scale: 1,
        });
    }
    shaped(&name, scale, &[rows.div_ceil(GROUP), per_row])?;
    Ok(Encoding::Fp8 {
        scales,
        rows_per_scale: GROUP,
    })
}

fn shaped(tensor: &str, raw: &RawTensor, expected: &[usize]) -> Result<(), Problem> {
    if raw.shape == expected {
        return Ok(());
    }
    let (tensor, found) = (tensor.to_owned(), raw.shape.clone());
    Err(Problem::Shape {
        tensor,
        file: raw.file(),
        expected: expected.into(),
        found,
    })
}

impl Scales {
    fn row(&self, row: usize) -> impl Iterator<Item = f32> {
        let (bytes, format) = (self.raw.bytes(), self.format);
        let size = match format {
            ScaleFormat::E8m0 => 1,
            ScaleFormat::Plain(plain) => plain.size(),
        };
        let width = self.per_row * size;
        bytes[row * width..][..width]
            .chunks_exact(size)
            .map(move |bytes| match format {
                ScaleFormat::E8m0 => formats::e8m0(bytes[0]),
                ScaleFormat::Plain(plain) => {
                    let mut value = [0.0];
                    plain.decode(bytes, &mut value);
                    value[0]
                }
            })
    }
}
