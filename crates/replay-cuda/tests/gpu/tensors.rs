//! Tensors of given bytes.

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};

/// Every dtype whose rows are moved.
pub(crate) const DTYPES: [DType; 10] = [
    DType::U8,
    DType::U32,
    DType::I16,
    DType::I32,
    DType::I64,
    DType::BF16,
    DType::F16,
    DType::F32,
    DType::F64,
    DType::F8E4M3,
];

/// Numbers that look random and are the same in every run.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Below `bound`, which is not zero.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// `len` bytes of any value: NaN among floats, and never all zero.
    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let words = (0..len.div_ceil(8)).flat_map(|_| self.next().to_le_bytes());
        words.take(len).map(|byte| byte | 1).collect()
    }

    /// `n` of the numbers below `bound`, ascending, none twice.
    pub(crate) fn ascending(&mut self, n: usize, bound: usize) -> Vec<u32> {
        let mut left = n.min(bound);
        let mut chosen = Vec::with_capacity(left);
        for row in 0..bound {
            if self.below(bound - row) < left {
                chosen.push(row as u32);
                left -= 1;
            }
        }
        chosen
    }

    pub(crate) fn shuffle<T>(&mut self, list: &mut [T]) {
        for i in (1..list.len()).rev() {
            list.swap(i, self.below(i + 1));
        }
    }
}

/// A tensor `[n_rows, width]` that begins `offset` elements into its storage.
pub(crate) fn view(
    bytes: &[u8],
    dtype: DType,
    (n_rows, width): (usize, usize),
    offset: usize,
    device: &Device,
) -> Tensor {
    let size = dtype.size_in_bytes();
    assert_eq!(bytes.len(), n_rows * width * size);
    // One element more, so that no storage is empty.
    let mut all = vec![0xa5; offset * size];
    all.extend_from_slice(bytes);
    all.extend(std::iter::repeat_n(0xa5, size));
    let len = all.len() / size;
    let all = Tensor::from_raw_buffer(&all, dtype, &[len], device).unwrap();
    let part = all.narrow(0, offset, n_rows * width).unwrap();
    part.reshape((n_rows, width)).unwrap()
}

/// A tensor like [`view`] of bytes that no operation writes: all ones, NaN as a float.
pub(crate) fn poisoned(
    dtype: DType,
    (n_rows, width): (usize, usize),
    offset: usize,
    device: &Device,
) -> Tensor {
    let bytes = vec![0xff; n_rows * width * dtype.size_in_bytes()];
    view(&bytes, dtype, (n_rows, width), offset, device)
}

/// The bytes of a tensor's elements.
pub(crate) fn bytes_of(tensor: &Tensor) -> Vec<u8> {
    let tensor = tensor
        .to_device(&Device::Cpu)
        .unwrap()
        .contiguous()
        .unwrap();
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        panic!("not on the CPU");
    };
    let (start, end) = layout.contiguous_offsets().unwrap();
    macro_rules! bytes {
        ($($dtype:ident: $bits:expr;)*) => {
            match storage {
                $(CpuStorage::$dtype(list) => list[start..end].iter().flat_map($bits).collect(),)*
                _ => panic!("no bytes of {:?}", tensor.dtype()),
            }
        };
    }
    bytes! {
        U8: |x| [*x];
        U32: |x| x.to_le_bytes();
        I16: |x| x.to_le_bytes();
        I32: |x| x.to_le_bytes();
        I64: |x| x.to_le_bytes();
        BF16: |x| x.to_bits().to_le_bytes();
        F16: |x| x.to_bits().to_le_bytes();
        F32: |x| x.to_bits().to_le_bytes();
        F64: |x| x.to_bits().to_le_bytes();
        F8E4M3: |x| [x.to_bits()];
    }
}

/// Panics unless two tensors are the same bit for bit, wherever they are.
#[track_caller]
pub(crate) fn assert_same(got: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(got.dims(), expected.dims(), "{what}");
    assert_eq!(got.dtype(), expected.dtype(), "{what}");
    let (got, expected) = (bytes_of(got), bytes_of(expected));
    if got == expected {
        return;
    }
    let at = got.iter().zip(&expected).position(|(a, b)| a != b).unwrap();
    let end = (at + 16).min(got.len());
    panic!(
        "{what}: byte {at} of {}: {:02x?}, expected {:02x?}",
        got.len(),
        &got[at..end],
        &expected[at..end]
    );
}
