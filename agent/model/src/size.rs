//! Numbers of bytes as people read and write them: in powers of 1024 on every screen, because limits are set so and what
//! is compared must have one scale. A program that agentd starts may tell its own sizes in powers of 1000.

/// In powers of 1024: `412 B`, `64 MiB`, `1.5 GiB`.
pub fn binary(bytes: u64) -> String {
    let (divisor, unit) = scale(bytes);
    format!("{} {unit}", count(bytes, divisor))
}

/// How much of a whole there is, in the unit of the whole: `30 of 120 MiB`.
pub fn part(done: u64, whole: u64) -> String {
    let (divisor, unit) = scale(whole);
    format!("{} of {} {unit}", count(done, divisor), count(whole, divisor))
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
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let power = (bytes.max(1).ilog2() / 10).min(5);
    ((1_u64 << (10 * power)) as f64, UNITS[power as usize])
}

/// One digit behind the point, where there is something behind it. A double holds every size to more digits than that.
fn count(bytes: u64, divisor: f64) -> String {
    let shown = format!("{:.1}", bytes as f64 / divisor);
    shown.strip_suffix(".0").unwrap_or(&shown).to_owned()
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
    fn test_sizes_are_told_in_powers_of_1024() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.5 KiB"),
            (64 << 20, "64 MiB"),
            (4 << 30, "4 GiB"),
            (u64::MAX, "16384 PiB"),
        ] {
            assert_eq!(binary(bytes), text);
        }
    }

    #[test]
    fn test_parts_are_told_in_the_unit_of_the_whole() {
        for (done, whole, text) in [
            (0, 0, "0 of 0 B"),
            (30, 412, "30 of 412 B"),
            (1 << 20, 120 << 20, "1 of 120 MiB"),
            (30 << 20, 3 << 29, "0 of 1.5 GiB"),
            (1 << 30, 3 << 29, "1 of 1.5 GiB"),
        ] {
            assert_eq!(part(done, whole), text);
        }
    }
}
