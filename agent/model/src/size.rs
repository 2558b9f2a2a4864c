//! Numbers of bytes as people read and write them.
//!
//! Two scales, and one rule for which: limits and what is compared with them (memory limits, quotas, reserves) are
//! set and shown in powers of 1024; measured sizes (files, packages, transfers, what a machine has) are shown in
//! powers of 1000.

/// In powers of 1024: `412 bytes`, `64 MiB`, `1.5 GiB`.
pub fn binary(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    let unit = (bytes.max(1).ilog2() / 10).min(4);
    match unit {
        0 => format!("{bytes} bytes"),
        // A double holds every size to far more digits than are shown.
        _ => {
            let shown = format!("{:.1}", bytes as f64 / (1_u64 << (10 * unit)) as f64);
            format!("{} {}", shown.strip_suffix(".0").unwrap_or(&shown), UNITS[unit as usize - 1])
        }
    }
}

/// In powers of 1000, short enough for a table: `412 B`, `1.5 MB`, `150 GB`.
pub fn decimal(bytes: u64) -> String {
    let (divisor, unit) = scale(bytes);
    format!("{} {unit}", count(bytes, bytes, divisor))
}

/// How much of a whole there is, in the unit of the whole: `30 of 120 MB`.
pub fn part(done: u64, whole: u64) -> String {
    let (divisor, unit) = scale(whole);
    format!("{} of {} {unit}", count(done, whole, divisor), count(whole, whole, divisor))
}

/// A number of bytes as people write it: a number with `b`, `k`, `m`, `g` or `t`, in powers of 1024.
pub fn parse(text: &str) -> Option<u64> {
    let text = text.trim().to_ascii_lowercase();
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let unit = text[split..].trim();
    let power = match unit.strip_suffix("ib").or_else(|| unit.strip_suffix('b')).unwrap_or(unit) {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return None,
    };
    text[..split].parse::<u64>().ok()?.checked_mul(1 << power)
}

/// A number of bytes that somebody wants for a job. One without a unit is bytes, and so few are never meant.
pub fn meant(text: &str) -> Result<u64, String> {
    let bytes = parse(text).ok_or("write it as 512m or 8g")?;
    match text.trim().parse::<u64>() {
        Ok(number) if (1..1 << 20).contains(&number) => {
            Err(format!("that is {number} bytes: write {number}g for GiB, or {number}m for MiB"))
        }
        _ => Ok(bytes),
    }
}

/// The divisor of a size, and the name of its unit.
fn scale(bytes: u64) -> (f64, &'static str) {
    const UNITS: [&str; 6] = ["B", "kB", "MB", "GB", "TB", "PB"];
    let (mut divisor, mut unit) = (1.0, 0);
    while bytes as f64 / divisor >= 999.5 && unit < UNITS.len() - 1 {
        divisor *= 1000.0;
        unit += 1;
    }
    (divisor, UNITS[unit])
}

/// With as many digits as the whole is shown with.
fn count(bytes: u64, whole: u64, divisor: f64) -> String {
    let digits = usize::from(divisor > 1.0 && whole as f64 / divisor < 9.95);
    format!("{:.digits$}", bytes as f64 / divisor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_a_number_that_lacks_its_unit_is_no_size() {
        assert_eq!(meant("4").unwrap_err(), "that is 4 bytes: write 4g for GiB, or 4m for MiB");
        assert!(meant("1048575").is_err() && meant("x").is_err());
        assert_eq!((meant("0"), meant("1048576"), meant("4b")), (Ok(0), Ok(1 << 20), Ok(4)));
        assert_eq!(meant("8g"), Ok(8 << 30));
    }

    #[test]
    fn test_limits_are_told_in_powers_of_1024() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1536, "1.5 KiB"),
            (64 << 20, "64 MiB"),
            (4 << 30, "4 GiB"),
            (u64::MAX, "16777216 TiB"),
        ] {
            assert_eq!(binary(bytes), text);
        }
    }

    #[test]
    fn test_what_is_counted_is_told_in_powers_of_1000() {
        for (bytes, text) in [
            (0, "0 B"),
            (412, "412 B"),
            (1500, "1.5 kB"),
            (999_600, "1.0 MB"),
            (2_340_000, "2.3 MB"),
            (150_000_000_000, "150 GB"),
            (u64::MAX, "18447 PB"),
        ] {
            assert_eq!(decimal(bytes), text);
        }
    }

    #[test]
    fn test_parts_are_told_in_the_unit_of_the_whole() {
        for (done, whole, text) in [
            (0, 0, "0 of 0 B"),
            (30, 412, "30 of 412 B"),
            (1_000_000, 120_000_000, "1 of 120 MB"),
            (30_000_000, 1_200_000_000, "0.0 of 1.2 GB"),
            (1_150_000_000, 1_200_000_000, "1.1 of 1.2 GB"),
        ] {
            assert_eq!(part(done, whole), text);
        }
    }
}
