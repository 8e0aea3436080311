//! Little-endian numbers of weight files to f32. Every conversion is exact.

use half::{bf16, f16};

/// bfloat16.
pub fn bf16_to_f32(bytes: &[u8], out: &mut [f32]) {
    let (pairs, _) = bytes.as_chunks::<2>();
    out.iter_mut().zip(pairs).for_each(|(out, b)| *out = bf16::from_le_bytes(*b).to_f32());
}

/// IEEE half precision.
pub fn f16_to_f32(bytes: &[u8], out: &mut [f32]) {
    let (pairs, _) = bytes.as_chunks::<2>();
    out.iter_mut().zip(pairs).for_each(|(out, b)| *out = f16::from_le_bytes(*b).to_f32());
}

/// IEEE single precision.
pub fn f32_from_le(bytes: &[u8], out: &mut [f32]) {
    let (quads, _) = bytes.as_chunks::<4>();
    out.iter_mut().zip(quads).for_each(|(out, b)| *out = f32::from_le_bytes(*b));
}
